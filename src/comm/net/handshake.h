// How two ranks that have connected prove to each other that they belong to one job: TLS 1.3 with a
// pre-shared key, and within it each sends its rank. Pure: bytes in, bytes out. No torch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/security/tls.h"

namespace lockstep::comm {

// What follows the handshake: as it is, or in the same TLS connection. Both sides must want the
// same.
enum class NetPayload : uint32_t { Plain = 1, Encrypted = 2 };

class NetHandshake {
 public:
  // The one that has connected to `peer`, or the one that was connected to.
  static NetHandshake caller(const Digest& key, int rank, int peer, NetPayload payload);
  static NetHandshake called(const Digest& key, int rank, NetPayload payload);

  // Exactly how many bytes to read next, since those after the handshake belong to others. 0 when
  // it is over.
  size_t wants() const { return wants_; }
  // Those bytes. Throws Error (TlsError) when the peer is not a rank of this job.
  void feed(std::string_view bytes);
  // Bytes for the peer.
  std::string take_output();
  bool is_over() const { return wants_ == 0; }
  // Known when it is over.
  int peer() const { return *peer_; }
  // Once it is over and all its output was taken: what encrypts the payload, if anything does.
  std::optional<Tls> take_channel();

 private:
  NetHandshake(Tls::Role role, const Digest& key, int rank, std::optional<int> peer,
               NetPayload payload);
  void hear(std::string_view plain);

  Tls tls_;
  const bool is_caller_;
  const NetPayload payload_;
  const int rank_;
  std::optional<int> peer_;
  size_t wants_;
  std::string record_;
  std::string heard_;
};

}  // namespace lockstep::comm
