// A pass in which no rank uses a parameter leaves what a hook carries for it as it was.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/lockstep.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using parallel::CastOptions;

struct SkippingImpl : torch::nn::Module {
  SkippingImpl() {
    torch::manual_seed(2);
    first = register_module("first", torch::nn::Linear(16, 16));
    second = register_module("second", torch::nn::Linear(16, 16));
    last = register_module("last", torch::nn::Linear(16, 1));
  }
  at::Tensor forward(const at::Tensor& x, bool skips) {
    const at::Tensor y = first(x).tanh();
    return last(skips ? y : second(y).tanh());
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, last{nullptr};
};
TORCH_MODULE(Skipping);

struct SeenOfSecond {
  std::vector<at::Tensor> gradients;  // of the second layer, in passes that used it
  std::map<std::string, at::Tensor> state;
};

// passes[i]: the batch, or -1 for a pass that skips the second layer.
SeenOfSecond run_skipping(World& world, const std::shared_ptr<CommHook>& hook,
                          const std::vector<int>& passes, const std::vector<int>& skipping) {
  Skipping net;
  Ddp ddp(net, world, {.bucket_bytes = {256}, .hook = hook});
  SeenOfSecond seen;
  for (const int batch : passes) {
    const bool skips = batch < 0 && std::ranges::find(skipping, world.rank()) != skipping.end();
    const at::Tensor x = at::randn(
        {4, 16},
        at::detail::createCPUGenerator(static_cast<uint64_t>(10 * (batch + 2) + world.rank())));
    ddp.zero_grad();
    net->forward(x, skips).square().mean().backward();
    if (batch < 0 && skipping.size() == static_cast<size_t>(world.size())) {
      EXPECT_FALSE(net->second->weight.grad().defined());
      continue;
    }
    for (const auto& parameter : net->second->parameters())
      seen.gradients.push_back(parameter.grad().clone());
  }
  seen.state = hook->state();
  return seen;
}

std::vector<std::shared_ptr<CommHook>> hooks_with_state() {
  return {std::make_shared<TopK>(TopKOptions{.fraction = 0.1}),
          std::make_shared<PowerSgd>(
              PowerSgdOptions{.rank = 1, .start_iteration = 1, .least_compression = 1.1}),
          std::make_shared<CastHook>(at::kBFloat16, CastOptions{.error_feedback = true})};
}

TEST(HooksUnused, APassThatNoRankUsesAParameterInTakesNothingFromLaterOnes) {
  spawn(2, [](World& world) {
    const std::vector<int> all{0, 1};
    for (size_t i = 0; i < hooks_with_state().size(); ++i) {
      const auto with = hooks_with_state()[i], without = hooks_with_state()[i];
      // The first pass of PowerSgd is exact.
      const SeenOfSecond some = run_skipping(world, with, {0, -1, 1, -1, -1, 2, 3, -1}, all);
      const SeenOfSecond none = run_skipping(world, without, {0, 1, 2, 3}, all);
      ASSERT_EQ(some.gradients.size(), none.gradients.size());
      for (size_t pass = 0; pass < none.gradients.size(); ++pass) {
        EXPECT_TRUE(at::equal(some.gradients[pass], none.gradients[pass]))
            << with->name() << " " << pass;
      }
      for (const auto& [name, tensor] : none.state) {
        if (name.find("second") == std::string::npos) continue;
        EXPECT_TRUE(at::equal(tensor, some.state.at(name))) << with->name() << " " << name;
      }
    }
  });
}

// One rank uses it: what the other carries for it is sent.
TEST(HooksUnused, AParameterThatOneRankUsesIsUsed) {
  spawn(2, [](World& world) {
    for (size_t i = 0; i < hooks_with_state().size(); ++i) {
      const SeenOfSecond before = run_skipping(world, hooks_with_state()[i], {0, 1}, {0}),
                         after = run_skipping(world, hooks_with_state()[i], {0, 1, -1}, {0});
      for (const auto& [name, tensor] : before.state) {
        if (name.ends_with("second.weight")) {
          EXPECT_FALSE(at::equal(tensor, after.state.at(name))) << hooks_with_state()[i]->name();
        }
      }
    }
  });
}

// Rank 0 has no batch, rank 1 has two, and then no rank has one.
int64_t passes_of_a_join(World& world, const std::shared_ptr<CommHook>& hook) {
  Skipping net;
  Ddp ddp(net, world, {.bucket_bytes = {256}, .hook = hook});
  parallel::Join join({ddp});
  for (int batch = 0; batch < 2 * world.rank(); ++batch) {
    ddp.zero_grad();
    net->forward(at::ones({4, 16}), /*skips=*/batch == 1).square().mean().backward();
  }
  join.finish();
  return hook->state().at("iteration").item<int64_t>();
}

TEST(HooksUnused, APassWithoutAnyBatchIsNotCounted) {
  spawn(2, [](World& world) {
    for (const int64_t start : {1, 2, 9}) {
      const auto power_sgd = std::make_shared<PowerSgd>(PowerSgdOptions{.start_iteration = start});
      EXPECT_EQ(passes_of_a_join(world, power_sgd), 2) << start;
    }
    const auto local_sgd = std::make_shared<LocalSgd>(LocalSgdOptions{.start_iteration = 9});
    EXPECT_EQ(passes_of_a_join(world, local_sgd), 2);
  });
}

}  // namespace
}  // namespace lockstep::test
