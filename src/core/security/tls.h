// TLS 1.3 from a secret alone: a pre-shared key with an ephemeral exchange of keys, no
// certificates. Pure: bytes in, bytes out.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "core/security/token.h"
#include "lockstep/core/error.h"

namespace lockstep {

// The peer speaks no TLS, has another key, or its data was changed on the way.
class TlsError : public Error {
 public:
  using Error::Error;
};

class Tls {
 public:
  enum class Role { Client, Server };

  Tls(Role role, const Digest& key);
  ~Tls();
  Tls(Tls&&) noexcept;
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  // Takes what the peer has sent; returns the decrypted bytes, as far as records are complete.
  // Throws TlsError.
  std::string feed(std::string_view bytes);
  // The same in two steps, without a copy: what the peer has sent, then as much of the decrypted
  // bytes as `to` has room for; 0 when more has to come first. Once the connection is open.
  void push(std::string_view bytes);
  size_t read(char* to, size_t room);
  // Whether the peer has proved that it knows the key.
  bool is_open() const;
  // Before the handshake is over it is kept for later.
  void write(std::string_view plain);
  // What is written from now on is encrypted with another key. write() does it by itself, long
  // before the limit of RFC 8446 for one key.
  void renew_key();
  // Bytes for the peer.
  std::string take_output();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep
