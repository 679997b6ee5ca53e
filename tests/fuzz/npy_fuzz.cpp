// Any bytes as a .npy file: a header that fits the file or DataError, and nothing else happens.
#include <cstdlib>
#include <string_view>

#include "data/npy/npy_header.h"
#include "lockstep/core/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  try {
    const std::string_view file(reinterpret_cast<const char*>(bytes), count);
    const auto header = lockstep::data::parse_npy(file, "fuzz");
    if (header.begin + static_cast<size_t>(header.elements * header.element_bytes) != count)
      std::abort();
    if (header.element_bytes < 1 || header.element_bytes > 16) std::abort();
  } catch (const lockstep::DataError&) {
  }
  return 0;
}
