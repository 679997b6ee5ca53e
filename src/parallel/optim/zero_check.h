// What a ZeroOptimizer compares between the ranks.
#pragma once

#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::parallel {

// All are called on every rank, and throw ConfigError on all.

// What one has to complain about, and the first of `all`, the parameters of the groups, that is
// another one there.
void check_same_parameters(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                           const std::vector<at::Tensor>& all, const Group& group);
// The class of `inner`, and the options of `whole`, which has all groups.
void check_same_options(const torch::optim::Optimizer& inner, const torch::optim::Optimizer& whole,
                        const Group& group);
// Where some parameters belong to a Ddp, the gradients of the others, which nothing has averaged
// unless the program has.
void check_same_gradients(const std::vector<at::Tensor>& parameters, const Group& group);

// Two tensors in the same memory, as an error's text; empty when there are none.
std::string tied_by_memory(const std::vector<at::Tensor>& parameters);

}  // namespace lockstep::parallel
