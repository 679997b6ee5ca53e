#include "lockstep/data/torch_dataset.h"

#include <torch/torch.h>

#include "data/loader/draws.h"
#include "data/rows.h"
#include "data/stack.h"
#include "lockstep/core/error.h"

namespace lockstep::data::torch_dataset {

void draw_for_batch(size_t first) {
  if (Draws* draws = Draws::current()) draws->for_batch(static_cast<int64_t>(first));
}

Batch stack(const std::vector<at::Tensor>& data, const std::vector<at::Tensor>& target,
            at::IntArrayRef indices) {
  return {stack_samples("data", data, indices), stack_samples("target", target, indices)};
}

int64_t known(std::optional<size_t> size) {
  if (!size) {
    throw ConfigError(
        "[torch data set] size() says nothing: ranks divide a data set by its number of samples; "
        "let size() return it");
  }
  return static_cast<int64_t>(*size);
}

std::vector<size_t> checked(at::IntArrayRef indices, int64_t size) {
  check_indices("[torch data set]", indices, size);
  return {indices.begin(), indices.end()};
}

}  // namespace lockstep::data::torch_dataset
