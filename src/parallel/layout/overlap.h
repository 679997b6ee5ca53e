// Tensors that lie in the same memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace lockstep::parallel {

// The first two different tensors that have elements in common, of which one at least is among the
// first `moved`: the lower index first. Views of one buffer that lie side by side have none. A
// tensor that has gaps in its memory counts as having none in common.
std::optional<std::pair<size_t, size_t>> first_overlap(const std::vector<at::Tensor>& tensors,
                                                       size_t moved);

}  // namespace lockstep::parallel
