// Device memory that NCCL accesses directly, without copies of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "comm/nccl/communicator.h"

namespace lockstep::comm {

// Zeroed and contiguous, on the group's device; registered with the group where this version of
// NCCL can do that. The memory keeps the communicator.
at::Tensor registered_memory(const std::shared_ptr<NcclComm>& comm, at::IntArrayRef sizes,
                             const at::TensorOptions& options);

}  // namespace lockstep::comm
