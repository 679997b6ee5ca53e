#include "lockstep/train/loss.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/functional/loss.h>

#include "lockstep/core/error.h"

namespace lockstep::train {
namespace {

namespace F = torch::nn::functional;

// Targets of the output's shape: a column that the data has as a vector becomes one.
at::Tensor shaped_as(const at::Tensor& output, const at::Tensor& target) {
  if (target.sizes() == output.sizes()) return target;
  if (output.numel() == target.numel() && output.squeeze().sizes() == target.squeeze().sizes()) {
    return target.view_as(output);
  }
  throw ConfigError(
      fmt::format("[loss] the model gives [{}], and the targets are [{}]: this loss compares "
                  "element by element; give the model as many outputs as a target has values",
                  fmt::join(output.sizes(), ", "), fmt::join(target.sizes(), ", ")));
}

// `one` in the dtype that PyTorch's arithmetic has for both: huber_loss has no mixed kernel, and
// bools cannot be subtracted.
at::Tensor in_dtype_of_both(const at::Tensor& one, const at::Tensor& other) {
  return one.to(at::promote_types(one.scalar_type(), other.scalar_type()));
}

// Class numbers may be of any whole dtype; libtorch takes int64 alone.
at::Tensor as_classes(const at::Tensor& target) {
  return at::isIntegralType(target.scalar_type(), true) ? target.to(at::kLong) : target;
}

// Whatever the model does, its loss would be 0.
void refuse_one_class(const at::Tensor& output) {
  if (output.dim() < 2 || output.size(1) != 1) return;
  throw ConfigError(
      fmt::format("[loss] cross_entropy of outputs [{}], which are of one class: it is 0 whatever "
                  "they are. Give "
                  "the model an output for each class and targets that are class numbers (csv: "
                  "data.classification: true), or use mse or bce_with_logits",
                  fmt::join(output.sizes(), ", ")));
}

}  // namespace

Loss cross_entropy(const CrossEntropyOptions& options) {
  const auto chosen = F::CrossEntropyFuncOptions()
                          .label_smoothing(options.label_smoothing)
                          .ignore_index(options.ignore_index);
  return [chosen](const at::Tensor& output, const at::Tensor& target) {
    refuse_one_class(output);
    return F::cross_entropy(output, as_classes(target), chosen);
  };
}

Loss mse() {
  return [](const at::Tensor& output, const at::Tensor& target) {
    return F::mse_loss(output, shaped_as(output, target));
  };
}

Loss l1() {
  return [](const at::Tensor& output, const at::Tensor& target) {
    return F::l1_loss(output, in_dtype_of_both(shaped_as(output, target), output));
  };
}

Loss huber(double delta) {
  return [delta](const at::Tensor& output, const at::Tensor& target) {
    return F::huber_loss(in_dtype_of_both(output, target),
                         in_dtype_of_both(shaped_as(output, target), output),
                         F::HuberLossFuncOptions().delta(delta));
  };
}

Loss bce_with_logits() {
  return [](const at::Tensor& output, const at::Tensor& target) {
    return F::binary_cross_entropy_with_logits(output,
                                               shaped_as(output, target).to(output.dtype()));
  };
}

Loss nll() {
  return [](const at::Tensor& output, const at::Tensor& target) {
    return F::nll_loss(output, as_classes(target));
  };
}

}  // namespace lockstep::train
