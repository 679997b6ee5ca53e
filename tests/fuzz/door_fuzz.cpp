// Any messages at the socket over which ranks of a host hand each other memory, with any number of
// descriptors: none is kept that was not handed over alone with a cookie, and not too many of
// those.
#include <fcntl.h>

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "comm/shm/door.h"
#include "core/process/descriptors.h"
#include "support/door_stranger.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  static const Fd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  static comm::Door& door = comm::Door::own();
  static const int64_t before = descriptors().used;
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  // A byte for the number of descriptors, one for the length, and that many bytes.
  while (rest.size() >= 2) {
    const auto count = static_cast<uint8_t>(rest[0]), length = static_cast<uint8_t>(rest[1]);
    const std::string_view bytes = rest.substr(2, length);
    rest.remove_prefix(2 + bytes.size());
    if (!test::send_to_door(door.address(), bytes, null.get(), count)) continue;
    if (door.take(comm::Cookie{1, 2}) && (bytes.size() != sizeof(comm::Cookie) || count != 1)) {
      std::abort();
    }
  }
  constexpr int64_t kKept = 256, kFuzzers = 32;  // files of the fuzzer itself
  if (descriptors().used > before + kKept + kFuzzers) std::abort();
  return 0;
}
