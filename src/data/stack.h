// A batch's tensor out of its samples'.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep::data {

// Samples indices[0], indices[1], ... stacked along a new dimension 0; undefined when they are.
// Throws DataError, with the two samples that differ, unless all have one shape and dtype. `what`:
// of which of a batch's tensors.
at::Tensor stack_samples(const char* what, const std::vector<at::Tensor>& tensors,
                         at::IntArrayRef indices);

}  // namespace lockstep::data
