#include "parallel/fused.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "lockstep/core/error.h"

namespace lockstep::parallel {

void check_fused(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 std::string_view address) {
  for (size_t group = 0; group < groups.size(); ++group) {
    const auto& parameters = groups[group].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto refuse = [&](std::string_view why) {
        throw ConfigError(fmt::format("[{}] parameter {} of group {} {}: use torch::optim for it",
                                      address, i, group, why));
      };
      if (!parameters[i].is_cpu()) {
        refuse(fmt::format("is on {}, and this is for CPUs", parameters[i].device().str()));
      }
      if (!parameters[i].is_non_overlapping_and_dense()) refuse("has overlapping or gapped memory");
      const at::Tensor& gradient = parameters[i].grad();
      if (gradient.defined() && gradient.layout() != at::kStrided) refuse("has a sparse gradient");
    }
  }
}

at::Tensor laid_out_like(const at::Tensor& tensor, const at::Tensor& parameter) {
  if (tensor.strides() == parameter.strides()) return tensor;
  return at::empty_like(parameter).copy_(tensor);
}

at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure) {
  if (!closure) return {};
  const at::AutoGradMode enable_grad(true);
  return closure();
}

}  // namespace lockstep::parallel
