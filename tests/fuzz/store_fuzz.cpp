// Any bytes as what a client of the key-value store sends: requests, or a stranger who is sent
// away; and, first byte 0xFF, the same as a handshake with a server that has a secret.
#include <algorithm>
#include <cstdlib>

#include "comm/store/protocol.h"
#include "core/security/tls.h"
#include "lockstep/core/error.h"

namespace {

void shake_hands(std::string_view bytes) {
  const lockstep::Digest key{1, 2, 3};
  lockstep::Tls server(lockstep::Tls::Role::Server, key);
  for (; !bytes.empty(); bytes.remove_prefix(std::min<size_t>(bytes.size(), 100))) {
    if (!server.feed(bytes.substr(0, 100)).empty() || server.is_open()) std::abort();
    (void)server.take_output();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, size_t size) {
  std::string_view left(reinterpret_cast<const char*>(data), size);
  try {
    if (size > 0 && data[0] == 0xFF) shake_hands(left.substr(1));
    for (size_t before = left.size(); const auto request = lockstep::comm::take_request(left);
         before = left.size()) {
      if (left.size() >= before || request->texts.size() > size) std::abort();
    }
  } catch (const lockstep::Error&) {
  }
  return 0;
}
