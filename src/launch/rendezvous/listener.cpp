#include "launch/rendezvous/listener.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "lockstep/core/error.h"

namespace lockstep::launch {

Listener listen_on_loopback(std::optional<uint16_t> port) {
  Listener listener{Fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), 0};
  const int fd = listener.socket.get();
  const int on = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port.value_or(0));
  socklen_t length = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  // The address of a job that has just ended may be used again at once.
  if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      bind(fd, generic, sizeof address) != 0 || listen(fd, SOMAXCONN) != 0 ||
      getsockname(fd, generic, &length) != 0) {
    const int error = errno;
    if (port) {
      throw ConfigError(fmt::format(
          "[run] --master-port {}: {} (127.0.0.1); leave the flag out to get a free port", *port,
          std::strerror(error)));
    }
    throw Error(fmt::format("[run] no port to listen on at 127.0.0.1: {}", std::strerror(error)));
  }
  listener.port = ntohs(address.sin_port);
  return listener;
}

}  // namespace lockstep::launch
