// Any bytes at a rank's port: as a handshake by one who has no secret, and as frames.
#include <algorithm>
#include <cstdlib>
#include <string>

#include "comm/net/frame.h"
#include "comm/net/handshake.h"
#include "lockstep/core/error.h"

namespace {

using namespace lockstep;
using namespace lockstep::comm;

void shake_hands(std::string_view bytes) {
  const Digest key{1, 2, 3};
  NetHandshake called = NetHandshake::called(key, 0, NetPayload::Plain);
  while (!bytes.empty()) {
    const size_t count = std::min(bytes.size(), called.wants());
    called.feed(bytes.substr(0, count));
    if (called.is_over()) std::abort();  // nobody guesses a secret
    (void)called.take_output();
    bytes.remove_prefix(count);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    shake_hands(bytes);
  } catch (const Error&) {
  }
  try {
    for (size_t at = 0; at + NetFrame::kBytes <= size; at += NetFrame::kBytes) {
      const std::string again = NetFrame::unpacked(bytes.data() + at).packed();
      if (again != bytes.substr(at, NetFrame::kBytes)) std::abort();
    }
  } catch (const Error&) {
  }
  return 0;
}
