#include "parallel/nn/recompute_checks.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "parallel/ddp/model.h"

namespace lockstep::parallel {
namespace {

constexpr int64_t kLooksAt = 64;  // elements of a result
constexpr double kTolerance =
    0.05;  // of the largest: more than bfloat16 differs by in other orders

std::string kind_of(const at::Tensor& result) {
  if (!result.defined()) return "nothing";
  return fmt::format("{} [{}]", c10::toString(result.scalar_type()),
                     fmt::join(result.sizes(), ", "));
}

at::Tensor some_of(const at::Tensor& result) {
  const at::NoGradGuard no_grad;
  const bool is_seen = result.defined() && result.is_cpu() && result.layout() == at::kStrided &&
                       result.is_floating_point() && result.numel() > 1;
  if (!is_seen) return {};
  const at::Tensor all = result.detach().reshape({-1});
  const int64_t step = std::max<int64_t>(1, all.numel() / kLooksAt);
  return all.slice(0, 0, std::nullopt, step).to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
}

bool are_close(const at::Tensor& a, const at::Tensor& b) {
  const double largest = at::nan_to_num(a).abs().max().item<double>();
  return largest == 0 || at::allclose(a, b, 0, kTolerance * largest, /*equal_nan=*/true);
}

}  // namespace

int64_t version_of(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() ? tensor._version() : 0;
}

void refuse_changes(const detail::Tensors& inputs, const std::vector<int64_t>& versions,
                    const std::string& module) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (version_of(inputs[i]) == versions[i]) continue;
    throw ConfigError(fmt::format(
        "[activation_checkpointing] forward() of {} changed an argument of shape [{}] in place, "
        "and backward would run it again on that: let it make a new tensor, to return or to assign "
        "to the argument, or leave the module out of ActivationCheckpointing",
        module, fmt::join(inputs[i].sizes(), ", ")));
  }
}

void refuse_replaced(const torch::nn::Module& module, const std::string& buffer) {
  throw ConfigError(fmt::format(
      "[activation_checkpointing] forward() of {} put another tensor in the place of buffer '{}', "
      "and backward would run it again on that: let it change the buffer in place, also in a "
      "scripted module (copy_()), or leave the module out of ActivationCheckpointing",
      module.name(), buffer));
}

ParametersBefore::ParametersBefore(const torch::nn::Module& module) {
  // Each forward() counts a version of these, and scales rows again that fit already.
  const auto scaled = renormalised_tables(module);
  for (const auto& parameter : module.parameters()) {
    if (!scaled.contains(parameter.unsafeGetTensorImpl()))
      all_.emplace_back(parameter, version_of(parameter));
  }
}

void ParametersBefore::refuse_changes(const torch::nn::Module& module) const {
  for (const auto& [parameter, version] : all_) {
    if (version_of(parameter) == version) continue;
    std::string name;
    for (const auto& item : module.named_parameters()) {
      if (item.value().is_same(parameter)) name = item.key();
    }
    throw ConfigError(fmt::format(
        "[activation_checkpointing] parameter '{}' of {} was modified by an inplace operation "
        "since "
        "forward() began, and backward would run it again with other values: call backward() "
        "before an optimizer's step(), and let forward() change buffers only",
        name, module.name()));
  }
}

ResultsBefore::ResultsBefore(const detail::Tensors& results) {
  for (const auto& result : results) {
    kinds_.push_back(kind_of(result));
    some_.push_back(some_of(result));
  }
}

void ResultsBefore::refuse_others(const detail::Tensors& results, const std::string& module) const {
  if (results.size() != kinds_.size()) {
    throw ConfigError(fmt::format(
        "[activation_checkpointing] forward() of {} made {} tensors, and {} when backward ran it "
        "again: it must do the same for the same arguments",
        module, kinds_.size(), results.size()));
  }
  for (size_t i = 0; i < results.size(); ++i) {
    std::string difference;
    if (const auto kind = kind_of(results[i]); kind != kinds_[i]) {
      difference = fmt::format("{}, and {} when backward ran it again", kinds_[i], kind);
    } else if (some_[i].defined() && !are_close(some_[i], some_of(results[i]))) {
      difference = fmt::format("{}, and other values when backward ran it again", kind);
    } else {
      continue;
    }
    throw ConfigError(fmt::format(
        "[activation_checkpointing] forward() of {} made {}: it must do the same for the same "
        "arguments, so let what else it computes with (a counter or a state in a member, "
        "for instance) be an argument or a buffer, and change nothing of that before backward",
        module, difference));
  }
}

}  // namespace lockstep::parallel
