// check_same() for Ddp, without the tensors that it ignores.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "lockstep/comm/group.h"
#include "parallel/ddp/model.h"

namespace lockstep::parallel {

// Compares the model of all ranks and, unless it is null, the optimizer's options and its state of
// the model's parameters. Every rank calls it. Throws ConfigError on all ranks when they differ,
// which begins with `when`, such as "pass 300 of Ddp 1". Also `order` unless it is
// nothing: data::divided_order().
void compare_ranks(const Model& model, const torch::optim::Optimizer* optimizer, const Group& group,
                   std::string_view when, std::optional<uint64_t> order);

}  // namespace lockstep::parallel
