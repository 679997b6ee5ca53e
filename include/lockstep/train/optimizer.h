// Optimizers as values, which a Trainer makes when it knows the parameters.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/core/compiler.h"

namespace lockstep::train {

// Makes an optimizer of parameter groups, and keeps the options of those that have some. (libtorch
// takes a value there that is its class's default, as a weight decay of 0 is SGD's, for one that is
// not given, and puts the optimizer's in its place.)
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(
    std::vector<torch::optim::OptimizerParamGroup>)>;

// Any of libtorch's, or one that is constructed as those are:
// optimizer<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-2)). Not LBFGS, which
// evaluates the loss several times a step.
template <class Kind, class Options>
MakeOptimizer optimizer(Options options) {
  return [options](std::vector<torch::optim::OptimizerParamGroup> groups)
             -> std::unique_ptr<torch::optim::Optimizer> {
    return std::make_unique<Kind>(std::move(groups), options);
  };
}

// Options of sgd().
struct SgdOptions {
  double lr = 1e-2;
  double momentum = 0;
  double weight_decay = 0;
  bool nesterov = false;
};

// Options of adam() and adamw().
struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
};

// On the CPU FusedSGD, FusedAdam and FusedAdamW, on a device libtorch's. State, options and files
// are the same. Throw ConfigError, when made, for numbers that libtorch refuses.
MakeOptimizer sgd(const SgdOptions& options = {});
MakeOptimizer adam(const AdamOptions& options = {});
MakeOptimizer adamw(const AdamOptions& options = {});

}  // namespace lockstep::train
