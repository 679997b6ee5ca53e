// Tensors that lie as a FlatLayout says.
#pragma once

#include <ATen/core/Tensor.h>

#include "parallel/layout/flat_layout.h"

namespace lockstep::parallel {

// Real numbers seen as elements of the dtype; an even count of them where it is complex.
at::Tensor as_elements(const at::Tensor& reals, at::ScalarType dtype);

// The other way: collectives know no complex numbers.
at::Tensor as_reals(const at::Tensor& tensor);

// A member's elements, one after the other. A view of `flat`, which has the layout's dtype.
at::Tensor member_of(const at::Tensor& flat, const FlatLayout& layout, size_t member);

}  // namespace lockstep::parallel
