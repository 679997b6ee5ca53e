// What Ddp has to equal: the gradients of each rank's loss from a plain module, averaged in the
// tree order of the transports.
#pragma once

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/core/error.h"
#include "lockstep/parallel/ddp.h"

namespace lockstep::test {

inline const std::vector<int> kWorlds{1, 2, 3, 4};

struct Mlp : torch::nn::Module {
  explicit Mlp(uint64_t seed = 0) {
    torch::manual_seed(seed);
    first = register_module("first", torch::nn::Linear(6, 8));
    second = register_module("second", torch::nn::Linear(8, 8));
    third = register_module("third", torch::nn::Linear(8, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    return third(torch::tanh(second(torch::tanh(first(x)))));
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
};

// Rank's part of step's batch: alike on whichever rank asks.
inline at::Tensor input(int rank, int step = 0, int64_t rows = 4) {
  auto generator = at::detail::createCPUGenerator(1000 * step + rank);
  return at::randn({rows, 6}, generator);
}

inline at::Tensor square_loss(Mlp& net, int rank, int step = 0) {
  return net.forward(input(rank, step)).square().mean();
}

inline at::Tensor square_loss_of_mlp(Mlp& net, int rank) { return square_loss(net, rank); }

// n addends, split at the largest power of two below n; undefined counts as zero.
inline at::Tensor tree_sum(const std::vector<at::Tensor>& addends) {
  const size_t n = addends.size();
  if (n == 1) return addends[0];
  size_t half = 1;
  while (half * 2 < n) half *= 2;
  const at::Tensor left = tree_sum({addends.begin(), addends.begin() + half});
  const at::Tensor right = tree_sum({addends.begin() + half, addends.end()});
  if (!left.defined() || !right.defined()) return left.defined() ? left : right;
  return left + right;
}

template <typename Module>
std::vector<at::Tensor> gradients(const Module& module) {
  std::vector<at::Tensor> all;
  for (const auto& parameter : module.parameters()) all.push_back(parameter.grad());
  return all;
}

// Of every parameter of make()'s module after loss(module, rank).backward() on each rank.
template <typename Make, typename Loss>
std::vector<at::Tensor> average_gradients(int ranks, Make make, Loss loss) {
  std::vector<std::vector<at::Tensor>> by_parameter;
  for (int rank = 0; rank < ranks; ++rank) {
    auto module = make();
    const at::Tensor value = loss(*module, rank);
    if (value.requires_grad()) value.backward();
    const auto mine = gradients(*module);
    by_parameter.resize(mine.size());
    for (size_t i = 0; i < mine.size(); ++i) by_parameter[i].push_back(mine[i]);
  }
  std::vector<at::Tensor> averages;
  for (const auto& addends : by_parameter) {
    const at::Tensor sum = tree_sum(addends);
    // The division of a complex by a real number has a rounding of its own; collectives see pairs
    // of reals.
    averages.push_back(!sum.defined()     ? sum
                       : sum.is_complex() ? at::view_as_complex(at::view_as_real(sum) / ranks)
                                          : sum / ranks);
  }
  return averages;
}

// Same definedness, dtype, sizes, and every element's bits (but -0 equals 0).
inline void expect_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].defined(), want[i].defined()) << "parameter " << i;
    if (!got[i].defined()) continue;
    EXPECT_EQ(got[i].scalar_type(), want[i].scalar_type()) << "parameter " << i;
    EXPECT_TRUE(at::equal(got[i], want[i]))
        << "parameter " << i << ", largest difference "
        << (got[i] - want[i]).abs().max().template item<double>();
  }
}

// Two passes, each from undefined gradients, so that the second one runs in rebuilt buckets.
template <typename Make, typename Loss>
void expect_averages(World& world, Make make, Loss loss, parallel::DdpOptions options = {}) {
  const auto want = average_gradients(world.size(), make, loss);
  auto module = make();
  Ddp ddp(*module, world.group(), options);
  for (int pass = 0; pass < 2; ++pass) {
    ddp.zero_grad();
    loss(*module, world.rank()).backward();
    SCOPED_TRACE(::testing::Message() << "pass " << pass << " of rank " << world.rank());
    expect_equal(gradients(*module), want);
  }
}

inline std::shared_ptr<Mlp> make_mlp() { return std::make_shared<Mlp>(); }

}  // namespace lockstep::test
