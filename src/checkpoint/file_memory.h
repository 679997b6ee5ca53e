// Tensors that lie in files, so that the kernel writes to a disk what memory has no room for.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>
#include <string>

#include "core/files/fd.h"

namespace lockstep::checkpoint {

// Zeros of one dimension, in a file of the folder that has no name there any more. Room on the disk
// is taken at once: where there is none, later, a write to the memory would end the process. What
// is smaller than a page lies in memory. Throws ConfigError, which names the folder.
at::Tensor file_zeros(const std::string& folder, int64_t count, const at::TensorOptions& options);

// zeros_like(), in a file of the same folder where the tensor lies in one.
at::Tensor zeros_beside(const at::Tensor& tensor);

// Why `bytes` cannot lie in files of the folder; "" when they can: then `held` reserves that room
// for as long as it is open.
std::string missing_room(const std::string& folder, int64_t bytes, Fd& held);

}  // namespace lockstep::checkpoint
