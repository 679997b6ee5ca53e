#include "comm/gloo/device.h"

#include "core/address.h"

namespace lockstep::comm {

std::optional<std::string> address_towards(const std::string& host, int port) {
  for (const Address& there : resolve(host, static_cast<uint16_t>(port)).addresses) {
    if (const auto own = source_towards(there)) return own->host();
  }
  return std::nullopt;
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

}  // namespace lockstep::comm
