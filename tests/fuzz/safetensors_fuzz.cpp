// Any bytes as a safetensors file: parse_safetensors returns tensors that lie in the file without
// gap or overlap, or throws CheckpointError.
#include <cstdlib>
#include <string_view>

#include "lockstep/checkpoint/error.h"
#include "lockstep/checkpoint/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  using namespace lockstep::checkpoint;
  const std::string_view text(reinterpret_cast<const char*>(bytes), count);
  try {
    const auto header = parse_safetensors(text, static_cast<int64_t>(count), "fuzz");
    int64_t total = 0;
    for (const auto& [name, tensor] : header.tensors) {
      if (tensor.begin < 8 || tensor.begin > tensor.end ||
          tensor.end > static_cast<int64_t>(count) ||
          elements(tensor.sizes) * tensor.dtype.bytes() != tensor.end - tensor.begin) {
        std::abort();
      }
      total += tensor.end - tensor.begin;
    }
    if (total > static_cast<int64_t>(count)) std::abort();
  } catch (const lockstep::CheckpointError&) {
  }
  return 0;
}
