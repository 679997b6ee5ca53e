// TLS 1.3 from the job's token alone: a pre-shared key with an ephemeral exchange of keys, no
// certificates. Pure: bytes in, bytes out.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "launch/token.h"

namespace lockstep::launch {

class Tls {
 public:
  enum class Role { Client, Server };

  Tls(Role role, const Digest& key);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  // What the peer has sent; returns what it means, as far as it is complete. Throws ProtocolError
  // when the peer speaks no TLS, or has another key.
  std::string feed(std::string_view bytes);
  // Before the handshake is over it is kept for later.
  void write(std::string_view plain);
  // Bytes for the peer.
  std::string take_output();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep::launch
