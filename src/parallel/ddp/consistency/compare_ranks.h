// check_same() for Ddp, without the tensors that it ignores.
#pragma once

#include <torch/optim/optimizer.h>

#include <string_view>

#include "lockstep/comm/group.h"
#include "parallel/ddp/model.h"

namespace lockstep::parallel {

// Compares the model of all ranks and, unless it is null, the optimizer's options and its state of
// the model's parameters. Every rank calls it. Throws ConfigError on all ranks when they differ,
// which begins with `when`, such as "pass 300 of Ddp 1". `with_order`: also the order in which the
// samples were last divided among ranks.
void compare_ranks(const Model& model, const torch::optim::Optimizer* optimizer, const Group& group,
                   std::string_view when, bool with_order);

}  // namespace lockstep::parallel
