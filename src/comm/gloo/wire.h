// Tensors in the form in which Gloo can carry and combine them.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "comm/gloo/group.h"
#include "lockstep/comm/group.h"

namespace lockstep::comm {

// The bytes of a contiguous tensor, as a flat uint8 tensor that shares them. One element counts as
// contiguous with any strides, which view() would keep: a row of a matrix of one column, say.
at::Tensor bytes_of(const at::Tensor& tensor);
std::vector<int64_t> byte_counts(const std::vector<at::Tensor>& tensors);
std::vector<at::Tensor> bytes_of(const std::vector<at::Tensor>& tensors);

// A reduction as Gloo knows it. Gloo has no int16 and no bool: int16 travels as int32, bool as
// uint8.
struct Wire {
  at::Tensor tensor;  // shares the memory of the source where it can
  c10d::ReduceOp op;
  // Puts the combined tensor into `target`, divided by `size` for an average.
  std::function<void(const at::Tensor& target, int size)> unpack;
};

Wire wire_of(const at::Tensor& source, ReduceOp op);

}  // namespace lockstep::comm
