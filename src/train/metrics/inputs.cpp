#include "train/metrics/inputs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <string>

#include "lockstep/core/error.h"

namespace lockstep::train {
namespace {

std::string sizes_of(const at::Tensor& tensor) {
  return tensor.defined() ? fmt::format("[{}]", fmt::join(tensor.sizes(), ", ")) : "undefined";
}

at::Tensor on_cpu(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.detach().to(at::kCPU, dtype).contiguous();
}

at::ScalarType compute_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Targets may be 0.0 and 1.0, as binary losses want them.
at::Tensor class_numbers(std::string_view who, const at::Tensor& targets) {
  if (targets.is_complex()) {
    throw ConfigError(fmt::format("[{}] targets are complex, not class numbers", who));
  }
  const at::Tensor numbers = on_cpu(targets, at::kLong);
  if (targets.is_floating_point() &&
      !at::equal(numbers.to(targets.scalar_type()), targets.detach().to(at::kCPU).contiguous())) {
    throw ConfigError(fmt::format("[{}] targets are fractions, not class numbers", who));
  }
  return numbers;
}

}  // namespace

at::Tensor sample_weights(std::string_view who, const at::Tensor& weights,
                          at::IntArrayRef samples) {
  if (!weights.defined()) return weights;
  at::Tensor all = on_cpu(weights, at::kDouble);
  if (all.sizes() != samples) {
    if (all.dim() != 1 || samples.empty() || all.size(0) != samples[0]) {
      throw ConfigError(fmt::format("[{}] weights {} do not fit samples [{}]", who,
                                    sizes_of(weights), fmt::join(samples, ", ")));
    }
    std::vector<int64_t> column(samples.size(), 1);
    column[0] = all.size(0);
    all = all.view(column).expand(samples).contiguous();
  }
  if (!at::isfinite(all).all().item<bool>() || at::lt(all, 0).any().item<bool>()) {
    throw ConfigError(fmt::format("[{}] weights need to be finite and not negative", who));
  }
  return all.flatten();
}

ClassRows class_rows(std::string_view who, const at::Tensor& outputs, const at::Tensor& targets,
                     const at::Tensor& weights, double threshold) {
  const auto refuse = [&](std::string_view why) {
    throw ConfigError(fmt::format("[{}] outputs {} and targets {}: {}", who, sizes_of(outputs),
                                  sizes_of(targets), why));
  };
  if (!outputs.defined() || !targets.defined()) refuse("both are needed");
  if (outputs.is_complex()) refuse("complex outputs have no order");
  ClassRows rows;
  rows.targets = class_numbers(who, targets).flatten();
  rows.weights = sample_weights(who, weights, targets.sizes());
  const bool one_number = outputs.dim() >= 1 && outputs.numel() == targets.numel() &&
                          (outputs.sizes() == targets.sizes() ||
                           (outputs.dim() == 2 && outputs.size(1) == 1 && targets.dim() == 1));
  if (one_number) {
    const at::Tensor numbers = on_cpu(outputs, compute_type(outputs)).flatten();
    rows.outputs = at::stack({at::full_like(numbers, threshold), numbers}, /*dim=*/1).contiguous();
    return rows;
  }
  if (outputs.dim() != targets.dim() + 1) refuse("needs n x classes and n, or with more after n");
  at::DimVector first(outputs.sizes()), last(outputs.sizes());
  first.erase(first.begin() + 1);
  last.pop_back();
  const bool classes_first = at::IntArrayRef(first) == targets.sizes();
  const bool classes_last = at::IntArrayRef(last) == targets.sizes();
  if (classes_first && classes_last && outputs.dim() > 2) {
    refuse("classes may be dimension 1 or the last: pass n x classes, flattened");
  }
  if (!classes_first && !classes_last) refuse("needs n x classes and n, or with more after n");
  const at::Tensor ordered = classes_last ? outputs : outputs.movedim(1, -1);
  const int64_t classes = ordered.size(-1);
  if (classes < 1) refuse("there are no classes");
  rows.outputs =
      on_cpu(ordered, compute_type(outputs)).reshape({rows.targets.size(0), classes}).contiguous();
  return rows;
}

std::string ignoring(std::optional<int64_t> ignore_index) {
  return ignore_index ? fmt::format(", ignoring {}", *ignore_index) : "";
}

}  // namespace lockstep::train
