// check_same() for Ddp, without the tensors that it ignores.
#pragma once

#include <torch/optim/optimizer.h>

#include <string_view>
#include <vector>

#include "data/loader/divided_order.h"
#include "lockstep/comm/group.h"
#include "parallel/ddp/model.h"

namespace lockstep::parallel {

// Compares the model of all ranks and, unless it is null, the optimizer's options and its state of
// the model's parameters, and `orders` as compare_orders() does. Every rank calls it. Throws
// ConfigError on all ranks when they differ, which begins with `when`, such as "pass 300 of Ddp 1".
void compare_ranks(const Model& model, const torch::optim::Optimizer* optimizer, const Group& group,
                   std::string_view when, const std::vector<data::DividedOrder>& orders);

// Compares in which orders the ranks divide samples, of which each gives those that are new to it.
// They differ where two ranks have an order each that the other does not have: a rank that alone
// looks at further samples does not keep the others from their parts. Every rank calls it. Throws
// as compare_ranks() does.
void compare_orders(const Group& group, std::string_view when,
                    const std::vector<data::DividedOrder>& orders);

}  // namespace lockstep::parallel
