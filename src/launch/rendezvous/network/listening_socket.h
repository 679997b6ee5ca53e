// The socket on which rank 0 serves the others.
#pragma once

#include <cstdint>
#include <optional>

#include "core/files/fd.h"

namespace lockstep::launch {

struct ListeningSocket {
  Fd socket;  // close-on-exec
  uint16_t port = 0;
};

// Listens on 127.0.0.1 at `port`, or at a free one. Throws ConfigError when the port is taken.
ListeningSocket listen_on_loopback(std::optional<uint16_t> port);

}  // namespace lockstep::launch
