#include "core/network/address.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "core/number.h"
#include "lockstep/core/error.h"

namespace lockstep {
Endpoint Endpoint::parse(std::string_view flag, std::string_view text, uint16_t default_port) {
  const auto wrong = [&] {
    return ConfigError(fmt::format("[run] {} '{}': give HOST or HOST:PORT", flag, text));
  };
  Endpoint endpoint{std::string(text), default_port};
  size_t colon = text.rfind(':');
  if (text.starts_with('[')) {
    const size_t end = text.find(']');
    if (end == std::string_view::npos) throw wrong();
    endpoint.host = text.substr(1, end - 1);
    colon = end + 1 < text.size() ? end + 1 : std::string_view::npos;
    if (colon != std::string_view::npos && text[colon] != ':') throw wrong();
  } else if (text.find(':') == colon && colon != std::string_view::npos) {
    endpoint.host = text.substr(0, colon);
  } else {
    colon = std::string_view::npos;  // none, or an IPv6 address without a port
  }
  if (colon != std::string_view::npos) {
    const auto port = whole_number_from<uint16_t>(text.substr(colon + 1));
    if (!port) throw wrong();
    endpoint.port = *port;
  }
  if (endpoint.host.empty()) throw wrong();
  return endpoint;
}

std::string Endpoint::text() const {
  const bool six = host.find(':') != std::string::npos;
  return fmt::format("{}{}{}:{}", six ? "[" : "", host, six ? "]" : "", port);
}

Address Address::of(const sockaddr* from) {
  Address address;
  address.length = from->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  std::memcpy(&address.storage, from, address.length);
  return address;
}

Address Address::loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return of(reinterpret_cast<const sockaddr*>(&address));
}

Address Address::any(uint16_t port) {
  Address address = loopback(port);
  reinterpret_cast<sockaddr_in&>(address.storage).sin_addr.s_addr = htonl(INADDR_ANY);
  return address;
}

std::string Address::host() const {
  std::array<char, NI_MAXHOST> text{};
  getnameinfo(generic(), length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  return text.data();
}

uint16_t Address::port() const {
  return ntohs(storage.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(storage).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(storage).sin_port);
}

Address Address::with_port(uint16_t port) const {
  Address other = *this;
  if (storage.ss_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6&>(other.storage).sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in&>(other.storage).sin_port = htons(port);
  }
  return other;
}

bool Address::is_loopback() const {
  if (storage.ss_family == AF_INET6) {
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr);
  }
  return ntohl(reinterpret_cast<const sockaddr_in&>(storage).sin_addr.s_addr) >> 24 == 127;
}

bool Address::is_link_local() const {
  return storage.ss_family == AF_INET6 &&
         IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr);
}

Resolved resolve(const std::string& host, uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
  addrinfo* list = nullptr;
  Resolved found;
  found.error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (found.error != 0) return found;
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, freeaddrinfo);
  for (const addrinfo* one = list; one != nullptr; one = one->ai_next) {
    found.addresses.push_back(Address::of(one->ai_addr));
  }
  // Not std::ranges', which clang 14 cannot compile.
  const auto is_v4 = [](const Address& one) { return one.storage.ss_family == AF_INET; };
  std::stable_partition(found.addresses.begin(), found.addresses.end(), is_v4);
  return found;
}

std::vector<Address> own_addresses() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  std::vector<Address> found;
  for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr) continue;
    const auto family = one->ifa_addr->sa_family;
    if (family == AF_INET || family == AF_INET6) found.push_back(Address::of(one->ifa_addr));
  }
  return found;
}

bool is_own(const Address& address) {
  if (address.is_loopback()) return true;
  const auto own = own_addresses();
  return std::any_of(own.begin(), own.end(),
                     [&](const Address& one) { return one.host() == address.host(); });
}

std::string with_interface_of(const std::string& own, const std::string& host) {
  const size_t interface = own.find('%'), other = host.find('%');
  if (interface == std::string::npos || other == std::string::npos) return host;
  return host.substr(0, other) + own.substr(interface);
}

std::optional<Address> source_towards(const Address& there) {
  // Connecting a datagram socket sends nothing: the kernel only looks up its routes.
  const Fd socket(::socket(there.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket || connect(socket.get(), there.generic(), there.length) != 0) return std::nullopt;
  return local_address(socket.get()).with_port(0);
}

std::optional<Fd> listen_at(const Address& address, int flags) {
  Fd socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | flags, 0));
  const int on = 1;
  // The address of a job that has just ended may be used again at once.
  if (!socket || setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      bind(socket.get(), address.generic(), address.length) != 0 ||
      listen(socket.get(), SOMAXCONN) != 0) {
    return std::nullopt;
  }
  return socket;
}

Address local_address(int socket) {
  Address address;
  address.length = sizeof address.storage;
  getsockname(socket, reinterpret_cast<sockaddr*>(&address.storage), &address.length);
  return address;
}

std::string host_name() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

}  // namespace lockstep
