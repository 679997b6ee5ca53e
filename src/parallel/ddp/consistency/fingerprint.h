// A hash by which ranks compare tensors without sending them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>
#include <vector>

namespace lockstep::parallel {

// Four chains of multiplications: 25 GB/s on one thread. Not resistant to deliberate collisions.
uint64_t fingerprint(std::string_view bytes);
// Of the elements in the order of their indices, with dtype and sizes. One on a device is copied.
uint64_t fingerprint(const at::Tensor& tensor);
// Of the first elements in memory: a microsecond, however large the tensor is. Tells what was made
// from other random numbers. 0 of one that is deferred or has overlapping or gapped memory.
uint64_t first_values(const at::Tensor& tensor);
// Of all of them, in order.
uint64_t fingerprint(const std::vector<at::Tensor>& tensors);

}  // namespace lockstep::parallel
