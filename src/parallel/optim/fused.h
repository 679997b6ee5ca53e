// What optimizers over torch's fused kernels share.
#pragma once

#include <torch/optim/optimizer.h>

#include <map>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep::parallel {

// The parameters of each group that have a gradient, each once, as Python's optimizers take them.
// Throws ConfigError, before anything has changed, for what the kernels cannot process: sparse
// gradients, parameters with overlapping or gapped memory, of no floating-point dtype or in two
// groups, gradients of another shape. `address` begins the message.
std::vector<std::vector<at::Tensor>> fused_parameters(
    const std::vector<torch::optim::OptimizerParamGroup>& groups, std::string_view address);

// One `Lists` for each device and dtype: what a device's kernels take in one call.
template <class Lists>
class ByKind {
 public:
  Lists& of(const at::Tensor& parameter) {
    const at::Device device = parameter.device();
    return lists_[{{device.type(), device.index()}, parameter.scalar_type()}];
  }
  auto begin() const { return lists_.begin(); }
  auto end() const { return lists_.end(); }

 private:
  std::map<std::pair<std::pair<at::DeviceType, at::DeviceIndex>, at::ScalarType>, Lists> lists_;
};

// Throws ConfigError when a parameter's state, which may be undefined, has another shape.
void check_fused_state(const at::Tensor& state, const at::Tensor& parameter,
                       std::string_view address);

// The kernels read memory in order: all tensors of a parameter have to have the same layout, and to
// be of one dtype. A copy where `tensor` is not.
at::Tensor laid_out_like(const at::Tensor& tensor, const at::Tensor& parameter);

// Tells autograd that the parameters were changed, which torch's fused kernels and ours do not: a
// graph that has saved one of them must not run backward any more.
void count_versions(const std::vector<at::Tensor>& parameters);

// What step() does with the closure that it was given, if any.
at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure);

}  // namespace lockstep::parallel
