#include "parallel/optim/fused.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>

#include "lockstep/core/error.h"

namespace lockstep::parallel {

std::vector<std::vector<at::Tensor>> fused_parameters(
    const std::vector<torch::optim::OptimizerParamGroup>& groups, std::string_view address) {
  std::vector<std::vector<at::Tensor>> all(groups.size());
  std::map<const at::TensorImpl*, size_t> group_of;
  for (size_t group = 0; group < groups.size(); ++group) {
    const auto& parameters = groups[group].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto refuse = [&](std::string_view why) {
        throw ConfigError(fmt::format("[{}] parameter {} of group {} {}: use torch::optim for it",
                                      address, i, group, why));
      };
      const at::Tensor& parameter = parameters[i];
      if (!parameter.is_non_overlapping_and_dense()) refuse("has overlapping or gapped memory");
      const auto [place, fresh] = group_of.try_emplace(parameter.unsafeGetTensorImpl(), group);
      if (place->second != group) {
        throw ConfigError(fmt::format("[{}] parameter {} of group {} is in group {}, too", address,
                                      i, group, place->second));
      }
      const at::Tensor& gradient = parameter.grad();
      if (!gradient.defined() || !fresh) continue;
      if (!parameter.is_floating_point()) refuse("is of no floating-point dtype");
      if (gradient.layout() != at::kStrided) refuse("has a sparse gradient");
      if (gradient.sizes() != parameter.sizes()) refuse("has a gradient of another shape");
      all[group].push_back(parameter);
    }
  }
  return all;
}

void check_fused_state(const at::Tensor& state, const at::Tensor& parameter,
                       std::string_view address) {
  if (!state.defined() || state.sizes() == parameter.sizes()) return;
  throw ConfigError(fmt::format(
      "[{}] a parameter of shape [{}] has a state of shape [{}], from before it was replaced: "
      "construct the optimizer after parameters have their shapes",
      address, fmt::join(parameter.sizes(), ", "), fmt::join(state.sizes(), ", ")));
}

at::Tensor laid_out_like(const at::Tensor& tensor, const at::Tensor& parameter) {
  if (tensor.strides() == parameter.strides() && tensor.scalar_type() == parameter.scalar_type()) {
    return tensor;
  }
  return at::empty_like(parameter).copy_(tensor);
}

void count_versions(const std::vector<at::Tensor>& parameters) {
  for (const auto& parameter : parameters) parameter.unsafeGetTensorImpl()->bump_version();
}

at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure) {
  if (!closure) return {};
  const at::AutoGradMode enable_grad(true);
  return closure();
}

}  // namespace lockstep::parallel
