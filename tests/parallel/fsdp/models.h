// Models for tests of Fsdp: blocks between an embedding and a head.
#pragma once

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/parallel/call.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fsdp.h"
#include "support/spawn.h"

namespace lockstep::test {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", torch::nn::Linear(width, 2 * width));
    down = register_module("down", torch::nn::Linear(2 * width, width));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

// Blocks larger than a cut's grid, so that parameters are divided within.
struct TowerImpl : torch::nn::Module {
  static constexpr int64_t kWidth = 40, kWords = 50;

  explicit TowerImpl(uint64_t seed = 0, int count = 3) {
    torch::manual_seed(seed);
    words = register_module("words", torch::nn::Embedding(kWords, kWidth));
    torch::nn::ModuleList list;
    for (int i = 0; i < count; ++i) {
      blocks.emplace_back(kWidth);
      list->push_back(blocks.back());
    }
    register_module("blocks", list);
    head = register_module("head", torch::nn::Linear(kWidth, kWords));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = words(tokens);
    for (auto& block : blocks) x = call(block, x);
    return head(x);
  }
  torch::nn::Embedding words{nullptr};
  std::vector<Block> blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Tower);

// A rank's tokens of a step, alike on whichever rank asks.
inline at::Tensor tower_input(int rank, int step = 0) {
  auto generator = at::detail::createCPUGenerator(1000 * step + rank);
  return at::randint(TowerImpl::kWords, {3, 7}, generator, at::kLong);
}

inline at::Tensor loss_of_scores(const at::Tensor& scores, const at::Tensor& tokens) {
  return torch::nn::functional::cross_entropy(scores.flatten(0, 1), tokens.flatten());
}

template <class Model>
at::Tensor tower_loss(Model& net, int rank, int step) {
  const at::Tensor tokens = tower_input(rank, step);
  return loss_of_scores(call(net, tokens), tokens);
}

// A rank's part of a whole tensor, as Fsdp's shard of it.
inline at::Tensor part_of_shard(const at::Tensor& whole, const parallel::FsdpShard& shard) {
  return whole.detach().contiguous().view({-1}).narrow(0, shard.begin, shard.shard.numel());
}

// `tolerance` 0: in every bit.
template <class Model>
void expect_same_gradients(const Fsdp& fsdp, const Model& usual, double tolerance) {
  const auto shards = fsdp.shards();
  const auto parameters = usual->named_parameters();
  for (const auto& shard : shards) {
    const at::Tensor& whole = parameters[shard.name].grad();
    ASSERT_EQ(shard.shard.grad().defined(), whole.defined()) << shard.name;
    if (!whole.defined()) continue;
    const at::Tensor want = part_of_shard(whole, shard);
    if (tolerance == 0) {
      EXPECT_TRUE(at::equal(shard.shard.grad(), want)) << shard.name;
    } else {
      EXPECT_TRUE(at::allclose(shard.shard.grad(), want, 1e-4, tolerance)) << shard.name;
    }
  }
}

// In every bit: the shards, and the whole parameters that forward() sees.
template <class Model>
void expect_same_parameters(Fsdp& fsdp, const Model& net, const Model& usual) {
  const auto wanted = usual->named_parameters();
  for (const auto& shard : fsdp.shards()) {
    EXPECT_TRUE(at::equal(shard.shard, part_of_shard(wanted[shard.name], shard))) << shard.name;
  }
  fsdp.unshard();
  for (const auto& item : net->named_parameters()) {
    EXPECT_TRUE(at::equal(item.value(), wanted[item.key()])) << item.key();
  }
  fsdp.reshard();
}

// Shared and gathered parameters, on two ranks.
inline void on_both(const std::function<void(World&, const FsdpOptions&)>& body) {
  for (const bool share : {true, false}) {
    spawn(2, [&](World& world) { body(world, {.share_memory = share}); });
  }
}

inline FsdpOptions with_units(FsdpOptions options,
                              std::vector<std::shared_ptr<torch::nn::Module>> units) {
  options.units = std::move(units);
  return options;
}

// A tied parameter has two names, and optimizers would update it twice.
inline std::vector<at::Tensor> each_once(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> once;
  for (const auto& parameter : parameters) {
    if (std::ranges::none_of(once, [&](const auto& other) { return other.is_same(parameter); })) {
      once.push_back(parameter);
    }
  }
  return once;
}

// Three steps of both, with an update between them.
template <class Model, class Loss>
void expect_as_ddp(World& world, const Model& net, const Model& usual, FsdpOptions options,
                   const Loss& loss) {
  Fsdp fsdp(net, world.group(), std::move(options));
  Ddp ddp(usual, world.group());
  torch::optim::SGD divided(fsdp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD whole(each_once(usual->parameters()),
                          torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 3; ++step) {
    fsdp.zero_grad();
    ddp.zero_grad();
    loss(net, step).backward();
    loss(usual, step).backward();
    expect_same_gradients(fsdp, usual, 0);
    divided.step();
    whole.step();
  }
  expect_same_parameters(fsdp, net, usual);
}

}  // namespace lockstep::test
