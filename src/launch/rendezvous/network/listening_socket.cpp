#include "launch/rendezvous/network/listening_socket.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>

#include "core/network/address.h"
#include "lockstep/core/error.h"

namespace lockstep::launch {

ListeningSocket listen_on_loopback(std::optional<uint16_t> port) {
  auto socket = listen_at(Address::loopback(port.value_or(0)));
  if (!socket && port) {
    throw ConfigError(
        fmt::format("[run] --master-port {}: {} (127.0.0.1); leave the flag out to get a free port",
                    *port, std::strerror(errno)));
  }
  if (!socket) {
    throw Error(fmt::format("[run] no port to listen on at 127.0.0.1: {}", std::strerror(errno)));
  }
  const uint16_t own = local_address(socket->get()).port();
  return {std::move(*socket), own};
}

}  // namespace lockstep::launch
