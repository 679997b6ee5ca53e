// Names and addresses of hosts.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/files/fd.h"

namespace lockstep {

// "host1:29400", "10.0.0.1", "[fd00::1]:29400"
struct Endpoint {
  std::string host;
  uint16_t port = 0;

  // Throws ConfigError that names `flag`.
  static Endpoint parse(std::string_view flag, std::string_view text, uint16_t default_port);
  // With brackets around an IPv6 address.
  std::string text() const;
};

struct Address {
  static Address loopback(uint16_t port);   // 127.0.0.1
  static Address any(uint16_t port);        // every IPv4 interface
  static Address of(const sockaddr* from);  // IPv4 or IPv6

  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* generic() const { return reinterpret_cast<const sockaddr*>(&storage); }
  std::string host() const;  // in digits
  uint16_t port() const;
  Address with_port(uint16_t port) const;
  bool is_loopback() const;
  bool is_link_local() const;  // IPv6: it means a host only together with an interface
};

struct Resolved {
  std::vector<Address> addresses;  // IPv4 first; empty when the name is not known, perhaps only yet
  int error = 0;                   // getaddrinfo's, for gai_strerror(); 0 when there are addresses
};
// May ask a name server, with the timeouts of the system's resolver; not with AI_NUMERICHOST in
// `flags`, with which only addresses are known.
Resolved resolve(const std::string& host, uint16_t port, int flags = 0);

// This host's, of every interface.
std::vector<Address> own_addresses();
bool is_own(const Address& address);

// `host` in digits as this host has to write it: a link-local address with the interface of `own`,
// this host's, since the name behind '%' is of the host that has told it.
std::string with_interface_of(const std::string& own, const std::string& host);

// This host's address from which it sends to `there`, by its routes; nothing when there is no
// route.
std::optional<Address> source_towards(const Address& there);

// A socket that listens there and nowhere else; port 0 is a free one. `flags`: SOCK_NONBLOCK or 0.
// Nothing, with errno set, when it cannot.
std::optional<Fd> listen_at(const Address& address, int flags = 0);
Address local_address(int socket);

std::string host_name();

}  // namespace lockstep
