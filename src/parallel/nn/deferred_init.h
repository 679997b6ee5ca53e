// The values of deferred tensors, for those that keep them elsewhere.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::parallel {

// A deferred tensor's values in memory of their own, of its sizes and strides; the tensor stays as
// it is. Another tensor is returned itself.
at::Tensor values_of(const at::Tensor& tensor);

}  // namespace lockstep::parallel
