#include "data/stack.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <string>

#include "comm/transport.h"
#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

std::string shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  return fmt::format("{} [{}]", comm::name_of(tensor.scalar_type()),
                     fmt::join(tensor.sizes(), ", "));
}

bool is_like(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type();
}

}  // namespace

at::Tensor stack_samples(const char* what, const std::vector<at::Tensor>& tensors,
                         at::IntArrayRef indices) {
  if (tensors.size() != indices.size()) {
    throw DataError(fmt::format("{} results for {} samples", tensors.size(), indices.size()));
  }
  for (size_t i = 1; i < tensors.size(); ++i) {
    if (is_like(tensors[0], tensors[i])) continue;
    throw DataError(
        fmt::format("{} of sample {} is {}, that of sample {} {}: all of a batch need "
                    "one shape and dtype",
                    what, indices[0], shape_of(tensors[0]), indices[i], shape_of(tensors[i])));
  }
  return tensors.empty() || !tensors[0].defined() ? at::Tensor() : at::stack(tensors);
}

}  // namespace lockstep::data
