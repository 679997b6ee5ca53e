// By which of its addresses a rank is reached.
#pragma once

#include <optional>
#include <string>

#include "comm/store/store.h"

namespace lockstep::comm {

// The address from which this host sends to `host`, as the kernel's routes say; nothing is sent.
// Nothing when `host` cannot be resolved or reached. Never goes by this host's own name, which
// Debian gives the address 127.0.1.1.
std::optional<std::string> address_towards(const std::string& host, int port);

bool is_loopback(const std::string& address);

}  // namespace lockstep::comm
