// Any bytes as what a client of the key-value store sends: requests, or a stranger who is sent
// away.
#include <cstdlib>

#include "comm/store_protocol.h"
#include "lockstep/core/error.h"

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, size_t size) {
  std::string_view left(reinterpret_cast<const char*>(data), size);
  try {
    for (size_t before = left.size(); const auto request = lockstep::comm::take_request(left);
         before = left.size()) {
      if (left.size() >= before || request->texts.size() > size) std::abort();
    }
  } catch (const lockstep::Error&) {
  }
  return 0;
}
