// A divided model with lanes leaves the bits of Ddp's lanes, on any number of ranks.
#include "lockstep/parallel/fsdp.h"

#include <gmock/gmock.h>

#include "lanes/training.h"
#include "lockstep/parallel/activation_checkpointing.h"
#include "lockstep/parallel/call.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

struct UnevenImpl : torch::nn::Module {
  UnevenImpl() {
    torch::manual_seed(11);
    first = register_module("first", torch::nn::Linear(20, 60));
    norm = register_module("norm", torch::nn::BatchNorm1d(60));
    middle = register_module("middle", torch::nn::Linear(60, 60));
    spare = register_module("spare", torch::nn::Linear(60, 60));
    last = register_module("last", torch::nn::Linear(60, 3));
  }
  // Some lanes go another way.
  at::Tensor forward(const at::Tensor& x, int64_t lane) {
    const at::Tensor y = torch::dropout(torch::relu(norm(call(first, x))), 0.2, is_training());
    return last(torch::tanh(lane % 3 == 0 ? call(spare, y) : call(middle, y)));
  }
  torch::nn::Linear first{nullptr}, middle{nullptr}, spare{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Uneven);

at::Tensor lane_batch(int64_t lane, int64_t step) {
  return drawn({6, 20}, static_cast<uint64_t>(1000 * step + lane));
}

// Three steps; parameters, buffers and losses as one number.
template <class Attached, class Optimizer>
uint64_t trained(const Uneven& net, Attached& attached, Optimizer& optimizer) {
  parallel::LaneMean losses(attached);
  uint64_t sum = 1;
  for (int64_t step = 0; step < 3; ++step) {
    attached.zero_grad();
    for (const Lane lane : attached.lanes(StepKey{.seed = 5, .step = step})) {
      {
        const auto hold = attached.hold();
        call(net, lane_batch(lane.index, 100 + step), lane.index).abs().mean().backward();
      }
      const at::Tensor loss = call(net, lane_batch(lane.index, step), lane.index).square().mean();
      loss.backward();
      losses.add(loss);
    }
    optimizer.step();
    sum = chained(sum, parallel::fingerprint(at::tensor({losses.mean()}, at::kDouble)));
    for (const auto& buffer : net->buffers()) sum = chained(sum, parallel::fingerprint(buffer));
  }
  return chained(sum, attached.fingerprint());
}

uint64_t of_ddp(int ranks, int64_t lanes) {
  return result_of({"auto", ranks}, [&](World& world) {
    const Uneven net;
    Ddp ddp(net, world.group(), {.lanes = lanes});
    FusedAdamW adam(net->parameters(), torch::optim::AdamWOptions(0.01));
    return trained(net, ddp, adam);
  });
}

uint64_t of_fsdp(const Ranks& ranks, FsdpOptions options) {
  return result_of(ranks, [&](World& world) {
    const Uneven net;
    options.units = {net->first.ptr()};
    // Units that only some lanes call need parameters that ranks share.
    if (options.share_memory) {
      options.units.insert(options.units.end(), {net->middle.ptr(), net->spare.ptr()});
    }
    Fsdp fsdp(net, world.group(), options);
    FusedAdamW adam(fsdp.parameters(), torch::optim::AdamWOptions(0.01));
    return trained(net, fsdp, adam);
  });
}

TEST(FsdpLanes, OneHashForEveryNumberOfRanksWhichIsThatOfDdp) {
  const uint64_t four = of_ddp(1, 4), five = of_ddp(1, 5);
  EXPECT_NE(four, 0);
  for (const int ranks : {1, 2, 3})
    EXPECT_EQ(of_fsdp({"auto", ranks}, {.lanes = 4}), four) << ranks;
  EXPECT_EQ(of_fsdp({"auto", 4}, {.lanes = 5}), five);
  // Gathered, with as many lanes a rank and with different numbers of them.
  EXPECT_EQ(of_fsdp({"auto", 2}, {.share_memory = false, .lanes = 4}), four);
  EXPECT_EQ(of_fsdp({"tcp", 3}, {.share_memory = false, .lanes = 5}), five);
  EXPECT_EQ(of_fsdp({"auto", 4, {0, 0, 1, 1}}, {.shard_ranks = 2, .lanes = 5}), five);
  EXPECT_EQ(of_fsdp({"auto", 2}, {.sharding = parallel::Sharding::None, .lanes = 5}), five);
}

TEST(FsdpLanes, NarrowGradientsAndRecomputedUnits) {
  const auto run = [](int ranks, bool recomputes) {
    return result_of({"auto", ranks}, [&](World& world) {
      Uneven net;
      net->norm->eval();  // whose statistics a second forward would change again
      std::optional<ActivationCheckpointing> again;
      if (recomputes)
        again.emplace(
            std::vector<std::shared_ptr<torch::nn::Module>>{net->middle.ptr(), net->spare.ptr()});
      Fsdp fsdp(net, world.group(),
                {.units = {net->first.ptr(), net->middle.ptr(), net->spare.ptr()},
                 .param_dtype = at::kBFloat16,
                 .buffer_dtype = at::kBFloat16,
                 .lanes = 4});
      torch::optim::SGD sgd(fsdp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      return trained(net, fsdp, sgd);
    });
  };
  const uint64_t alone = run(1, false);
  EXPECT_NE(alone, 0);
  EXPECT_EQ(run(3, false), alone);
  EXPECT_EQ(run(2, true), alone);
}

struct RowImpl : torch::nn::Module {
  RowImpl() {
    torch::manual_seed(12);
    for (int i = 0; i < 4; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(20, 20)));
    }
  }
  // The last lane leaves out a layer, so that its rank keeps the other layers' gradients to the
  // end, in the memory that it would be given for those of this one.
  at::Tensor forward(at::Tensor x, int64_t lane) {
    for (size_t i = 0; i < layers.size(); ++i) {
      if (i != 2 || lane != 5) x = torch::tanh(call(layers[i], x));
    }
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Row);

// Three lanes a rank are two partial sums, which take two calls to add.
TEST(FsdpLanes, RanksWhoseLastLanesCallOtherUnits) {
  const auto run = [](int ranks) {
    return result_of({"auto", ranks}, [&](World& world) {
      const Row net;
      FsdpOptions options{.lanes = 6};
      for (const auto& layer : net->layers) options.units.push_back(layer.ptr());
      Fsdp fsdp(net, world.group(), options);
      torch::optim::SGD sgd(fsdp.parameters(), torch::optim::SGDOptions(0.1));
      for (int64_t step = 0; step < 3; ++step) {
        fsdp.zero_grad();
        for (const Lane lane : fsdp.lanes(StepKey{.seed = 5, .step = step})) {
          call(net, lane_batch(lane.index, step), lane.index).square().mean().backward();
        }
        sgd.step();
      }
      return fsdp.fingerprint();
    });
  };
  const uint64_t alone = run(1);
  EXPECT_NE(alone, 0);
  EXPECT_EQ(run(2), alone);
}

// The first has entered the lane by then.
TEST(FsdpLanes, WhatTheSecondModelOfALoopRefusesEndsTheLaneOfTheFirst) {
  spawn(2, [](World& world) {
    const Uneven net, other;
    Fsdp first(net, world.group(), {.lanes = 2}), second(other, world.group(), {.lanes = 2});
    const StepKey key{.seed = 1, .step = 0};
    int lanes = 0;
    const auto run = [&] {
      first.zero_grad();
      second.zero_grad();
      for (const Lane lane : first.lanes(key, second)) {
        call(net, lane_batch(lane.index, 0), lane.index).square().mean().backward();
        call(other, lane_batch(lane.index, 0), lane.index).square().mean().backward();
        ++lanes;
      }
    };
    second.parameters()[0].set_requires_grad(false);
    EXPECT_THAT(message_of<ConfigError>(run), ::testing::HasSubstr("was frozen"));
    second.parameters()[0].set_requires_grad(true);
    run();
    EXPECT_EQ(lanes, 1);
  });
}

TEST(FsdpLanes, WhatIsNoFunctionOfLanesIsRefusedOnAllRanks) {
  spawn(2, [](World& world) {
    using ::testing::HasSubstr;
    const Group& group = world.group();
    const auto refused = [](const auto& body) { return message_of<ConfigError>(body); };
    EXPECT_THAT(refused([&] { Fsdp(Uneven(), group, {.lanes = 1}); }),
                HasSubstr("lanes = 1 on 2 ranks"));
    EXPECT_THAT(refused([&] { Fsdp(Uneven(), group, {.lanes = 2, .buffers = Buffers::None}); }),
                HasSubstr("Buffers::None together with lanes"));
    const Uneven net;
    Fsdp fsdp(net, group, {.units = {net->first.ptr()}, .lanes = 4});
    const auto backward = [&](int64_t lane) {
      call(net, lane_batch(lane, 0), lane).square().mean().backward();
    };
    EXPECT_THAT(refused([&] { backward(0); }), HasSubstr("backward() outside of a lane"));
    fsdp.zero_grad();
    const StepKey key{.seed = 1, .step = 0};
    EXPECT_THAT(refused([&] {
                  for (const Lane lane : fsdp.lanes(key)) {
                    if (lane.index != 1) backward(lane.index);
                  }
                }),
                HasSubstr("rank 0: lane 1 of 4 of the step has had no backward()"));
    fsdp.zero_grad();
    EXPECT_THAT(refused([&] {
                  for (const Lane lane : fsdp.lanes(key)) {
                    backward(lane.index);
                    if (lane.index == 0) backward(lane.index);
                  }
                }),
                HasSubstr("a second backward() in lane 0 of 4"));
    fsdp.zero_grad();
    EXPECT_THAT(refused([&] {
                  for (const Lane lane : fsdp.lanes(key)) {
                    if (lane.index == 0) {
                      const auto x = lane_batch(lane.index, 0).requires_grad_();
                      x.register_hook(
                          [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("a"); });
                      const auto loss = call(net, x, lane.index).square().mean();
                      EXPECT_THROW(loss.backward(), std::runtime_error);
                    }
                    backward(lane.index);
                  }
                }),
                HasSubstr("after one that threw, leave the loop and begin the step again"));
    fsdp.zero_grad();
    for (const Lane lane : fsdp.lanes(key)) backward(lane.index);
    for (const auto& leaf : fsdp.parameters()) EXPECT_TRUE(leaf.grad().defined());
  });
}

}  // namespace
}  // namespace lockstep::test
