#include "comm/gloo/device.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include "comm/store/resolve.h"

namespace lockstep::comm {
namespace {

std::optional<std::string> own_address(int socket) {
  sockaddr_storage own{};
  socklen_t length = sizeof own;
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&own), &length) != 0) return std::nullopt;
  char text[NI_MAXHOST];
  if (getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text, sizeof text, nullptr, 0,
                  NI_NUMERICHOST) != 0) {
    return std::nullopt;
  }
  return text;
}

}  // namespace

std::optional<std::string> address_towards(const std::string& host, int port) {
  const Found found = look_up(host, port);
  for (const addrinfo* entry = found.addresses.get(); entry; entry = entry->ai_next) {
    const int socket = ::socket(entry->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (socket < 0) continue;
    // Connecting a datagram socket chooses the route and sends nothing.
    std::optional<std::string> address;
    if (connect(socket, entry->ai_addr, entry->ai_addrlen) == 0) address = own_address(socket);
    close(socket);
    if (address) return address;
  }
  return std::nullopt;
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

}  // namespace lockstep::comm
