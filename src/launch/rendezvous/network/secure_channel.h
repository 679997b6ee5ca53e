// Two launchers talking over a stream of bytes: a handshake in which both prove that they know the
// job's token, then messages, each with a code that only they can make. Pure: bytes in, bytes and
// messages out. docs/launching_protocol.md has the format.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/security/token.h"
#include "launch/rendezvous/network/codec.h"
#include "launch/rendezvous/network/message.h"

namespace lockstep {
class Tls;
}

namespace lockstep::launch {

// Processes that know these belong to the job.
struct Keys {
  Digest proof;  // of belonging, and of each message
  Digest tls;
  Digest ranks;  // for the ranks among themselves
  bool use_tls = false;

  static Keys of(const Token& token, std::string_view run_id);
};

class SecureChannel {
 public:
  static constexpr uint16_t kVersion = 3;
  enum class Side { Caller, Called };

  // `version`: this side's, for tests.
  SecureChannel(Side side, const Keys& keys, uint16_t version = kVersion);
  ~SecureChannel();
  SecureChannel(SecureChannel&&) noexcept;

  // What the peer has sent. Throws ProtocolError when it is not a launcher of this job; nothing
  // more may be fed then, but the remaining output still tells the peer why.
  void feed(std::string_view bytes);
  // Both sides have authenticated.
  bool is_open() const { return state_ == State::Open; }
  // Messages that have come since, in order.
  std::vector<MessagePtr> take_messages() { return std::exchange(messages_, {}); }
  // Only when is_open(). `bytes`: encode()'s, which serve for many channels.
  void send(std::string_view bytes);
  // Bytes for the peer.
  std::string take_output();

 private:
  enum class State { Hello, Challenge, Proof, Confirmation, Open, Failed };

  void write(std::string_view plain);
  void read();
  std::optional<std::string_view> take(size_t count);
  void on_greeting(std::string_view bytes);
  void on_proof(std::string_view bytes);
  bool read_message();
  Digest proof_of(Side side) const;
  void open();
  [[noreturn]] void fail(const std::string& what);

  const Side side_;
  const Keys keys_;
  const uint16_t version_;
  std::unique_ptr<Tls> tls_;
  State state_;
  std::string nonce_, peer_nonce_;
  Digest sending_{}, receiving_{};  // keys of this channel
  uint64_t sent_ = 0, received_ = 0;
  std::string input_, output_;
  size_t used_ = 0;  // of input_
  std::vector<MessagePtr> messages_;
};

}  // namespace lockstep::launch
