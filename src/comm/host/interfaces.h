// The addresses at which other hosts reach this one. Addresses are texts, in digits. No torch.
#pragma once

#include <optional>
#include <string>

namespace lockstep::comm {

// The address from which this host sends to `host`, as the kernel's routes say; nothing is sent.
// Nothing when `host` cannot be resolved or reached. Never goes by this host's own name, which
// Debian gives the address 127.0.1.1.
std::optional<std::string> address_towards(const std::string& host, int port);

// An interface's IPv4 address, else its IPv6 one; nothing when it has neither.
std::optional<std::string> address_of_interface(const std::string& name);

bool is_loopback(const std::string& address);

}  // namespace lockstep::comm
