#include "parallel/layout/flat_memory.h"

#include <ATen/ATen.h>

namespace lockstep::parallel {

at::Tensor as_elements(const at::Tensor& reals, at::ScalarType dtype) {
  return at::isComplexType(dtype) ? at::view_as_complex(reals.view({-1, 2})) : reals;
}

at::Tensor as_reals(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

at::Tensor member_of(const at::Tensor& flat, const FlatLayout& layout, size_t member) {
  const auto& [name, numel, begin] = layout.members()[member];
  return flat.narrow(0, begin, numel);
}

}  // namespace lockstep::parallel
