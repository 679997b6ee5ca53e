// Any bytes as an image file: pixels of the size it says, or DataError, and nothing else happens.
#include <cstdlib>
#include <string_view>

#include "data/image/decode_image.h"
#include "lockstep/core/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  try {
    const std::string_view file(reinterpret_cast<const char*>(bytes), count);
    const auto pixels = lockstep::data::decode_image(file, "fuzz", 1 << 16);
    if (pixels.rgb.size() != static_cast<size_t>(pixels.height * pixels.width * 3)) std::abort();
  } catch (const lockstep::DataError&) {
  }
  return 0;
}
