// What optimizers over torch's fused kernels share.
#pragma once

#include <torch/optim/optimizer.h>

#include <string_view>
#include <vector>

namespace lockstep::parallel {

// Throws ConfigError, before anything has changed, for what the kernels cannot walk: sparse
// gradients, parameters with overlapping or gapped memory. `address` begins the message.
void check_fused(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 std::string_view address);

// The kernels walk plain memory: all tensors of a parameter have to be laid out alike.
at::Tensor laid_out_like(const at::Tensor& tensor, const at::Tensor& parameter);

// What step() does with the closure that it was given, if any.
at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure);

}  // namespace lockstep::parallel
