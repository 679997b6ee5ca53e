#include "lockstep/train/optimizer.h"

#include <fmt/format.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/fused_sgd.h"

namespace lockstep::train {
namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

// The fused ones are for CPUs; a device has kernels of its own.
bool on_cpu(const Groups& groups) {
  return std::all_of(groups.begin(), groups.end(), [](const auto& group) {
    const auto& parameters = group.params();
    return std::all_of(parameters.begin(), parameters.end(),
                       [](const at::Tensor& one) { return one.is_cpu(); });
  });
}

template <class Fused, class Plain, class Options>
MakeOptimizer by_device(Options options) {
  return [options](Groups groups) -> std::unique_ptr<torch::optim::Optimizer> {
    try {
      if (on_cpu(groups)) return std::make_unique<Fused>(std::move(groups), options);
      return std::make_unique<Plain>(std::move(groups), options);
    } catch (const c10::Error& error) {
      throw ConfigError(fmt::format("[train] optimizer: {}", error.what_without_backtrace()));
    }
  };
}

}  // namespace

MakeOptimizer sgd(const SgdOptions& o) {
  return by_device<parallel::FusedSGD, torch::optim::SGD>(torch::optim::SGDOptions(o.lr)
                                                              .momentum(o.momentum)
                                                              .weight_decay(o.weight_decay)
                                                              .nesterov(o.nesterov));
}

MakeOptimizer adam(const AdamOptions& o) {
  return by_device<parallel::FusedAdam, torch::optim::Adam>(torch::optim::AdamOptions(o.lr)
                                                                .betas({o.beta1, o.beta2})
                                                                .eps(o.eps)
                                                                .weight_decay(o.weight_decay));
}

MakeOptimizer adamw(const AdamOptions& o) {
  return by_device<parallel::FusedAdamW, torch::optim::AdamW>(torch::optim::AdamWOptions(o.lr)
                                                                  .betas({o.beta1, o.beta2})
                                                                  .eps(o.eps)
                                                                  .weight_decay(o.weight_decay));
}

}  // namespace lockstep::train
