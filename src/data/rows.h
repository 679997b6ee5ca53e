// Building a batch out of rows of arrays in memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

namespace lockstep::data {

// Throws DataError with `address` and the first index outside [0, size).
void check_indices(std::string_view address, at::IntArrayRef indices, int64_t size);

// An uninitialised contiguous CPU tensor: `spare` itself when it is one of these sizes and dtype
// whose memory has no other reference.
at::Tensor reuse_or_empty(at::Tensor spare, at::IntArrayRef sizes, at::ScalarType dtype);

}  // namespace lockstep::data
