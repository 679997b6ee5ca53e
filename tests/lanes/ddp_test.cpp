// What a program with lanes may do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "lanes/net.h"
#include "lanes/training.h"
#include "lockstep/parallel/global_mean.h"
#include "lockstep/parallel/grad_scaler.h"
#include "lockstep/parallel/random.h"
#include "support/thrown.h"

namespace lockstep {
namespace {

using parallel::LaneMean;
using test::gradients_hash;
using test::LaneNet;
using test::message_of;
using test::Ranks;
using test::result_of;
using test::spawn;
using testing::HasSubstr;

// The same program, in which `lane_body` runs a lane, has one result on 1, 2, 3 and 5 ranks.
void expect_one_result(const std::function<uint64_t(World&)>& program) {
  const auto alone = result_of({"shm", 1}, program);
  EXPECT_NE(alone, 0);
  for (const auto& ranks : {Ranks{"shm", 2}, Ranks{"shm", 3}, Ranks{"tcp", 5}}) {
    EXPECT_EQ(result_of(ranks, program), alone) << ranks.name();
  }
}

TEST(LanesOfDdp, AverageTheTreeOverLanes) {
  expect_one_result([](World& world) {
    LaneNet net;
    Ddp ddp(net, world.group(), {.bucket_bytes = {64}, .lanes = 8});
    for (Lane lane : ddp.lanes(StepKey{})) net.loss(lane.index).backward();
    // By hand.
    std::vector<at::Tensor> leaves;
    for (int64_t lane = 0; lane < 8; ++lane) {
      LaneNet alone;
      alone.loss(lane).backward();
      const auto gradient = alone.second->weight.grad();
      leaves.push_back(gradient.defined() ? gradient : at::zeros({2, 7}));
    }
    while (leaves.size() > 1) {
      std::vector<at::Tensor> next;
      for (size_t i = 0; i < leaves.size(); i += 2) next.push_back(leaves[i] + leaves[i + 1]);
      leaves = next;
    }
    EXPECT_TRUE(net.second->weight.grad().equal(leaves[0] / 8));
    EXPECT_FALSE(net.never->weight.grad().defined());
    EXPECT_TRUE(net.table->weight.grad().is_sparse());
    return gradients_hash(net);
  });
}

TEST(LanesOfDdp, AreThePlainOneWhereEachRankHasOne) {
  spawn(3, [](World& world) {
    LaneNet plain, lanes;
    Ddp one(plain, world.group()), other(lanes, world.group(), {.lanes = 3});
    for (int step = 0; step < 3; ++step) {
      one.zero_grad();
      other.zero_grad();
      plain.loss(world.rank(), step).backward();
      for (Lane lane : other.lanes(StepKey{.step = step})) lanes.loss(lane.index, step).backward();
      EXPECT_EQ(gradients_hash(plain), gradients_hash(lanes));
      EXPECT_EQ(one.fingerprint(), other.fingerprint());
    }
  });
}

TEST(LanesOfDdp, MayHoldAndMayKeepGradientsOfBefore) {
  expect_one_result([](World& world) {
    LaneNet net;
    Ddp ddp(net, world.group(), {.lanes = 8});
    uint64_t sum = 1;
    for (int step = 0; step < 3; ++step) {
      // Not zeroed: the gradients of the step before count as a part of every lane's.
      for (Lane lane : ddp.lanes(StepKey{.step = step})) {
        {
          const auto hold = ddp.hold();
          net.loss(lane.index, step).backward();
          net.never(net.second(net.hidden(lane.index))).sum().backward();
        }
        net.loss(lane.index + 1, step).backward();
      }
      sum = test::chained(sum, gradients_hash(net));
    }
    return sum;
  });
}

TEST(LanesOfDdp, LeaveGradientsOfBeforeWhereNoLaneReaches) {
  expect_one_result([](World& world) {
    LaneNet net;
    Ddp ddp(net, world.group(), {.lanes = 8});
    for (Lane lane : ddp.lanes(StepKey{})) net.loss(lane.index).backward();
    const auto of_table = net.table->weight.grad().to_dense().clone();
    const auto of_spare = net.spare->weight.grad().clone();
    EXPECT_GT(of_table.abs().sum().item<float>(), 0);
    for (const bool is_frozen : {false, true}) {
      net.table->weight.set_requires_grad(!is_frozen);
      for (Lane lane : ddp.lanes(StepKey{.step = 1}))
        net.second(torch::tanh(net.first(test::drawn({4, 5}, lane.index)))).sum().backward();
      const auto table = net.table->weight.grad(), spare = net.spare->weight.grad();
      EXPECT_TRUE(table.defined() && table.to_dense().equal(of_table)) << "frozen: " << is_frozen;
      EXPECT_TRUE(spare.defined() && spare.equal(of_spare)) << "frozen: " << is_frozen;
    }
    return gradients_hash(net);
  });
}

TEST(LanesOfDdp, MeetHooksOfTheUsersAndHistory) {
  expect_one_result([](World& world) {
    LaneNet net;
    int seen = 0;
    auto hook = net.first->weight.register_hook([&](const at::Tensor& gradient) {
      ++seen;
      return gradient * 2;
    });
    (void)hook;
    Ddp ddp(net, world.group(), {.lanes = 8});
    for (Lane lane : ddp.lanes(StepKey{})) {
      net.loss(lane.index).backward({}, /*keep_graph=*/true, /*create_graph=*/lane.index % 2 == 0);
    }
    EXPECT_EQ(seen, Shard(world.rank(), world.size()).of(8).size());
    return gradients_hash(net);
  });
}

// As a custom function's backward() may return them: libtorch refuses writes to both.
TEST(LanesOfDdp, TakeGradientsThatMayNotBeWrittenTo) {
  for (const bool are_zeros : {false, true}) {
    expect_one_result([&](World& world) {
      LaneNet net;
      net.first->weight.register_hook([&](const at::Tensor& gradient) {
        const c10::InferenceMode inference;
        return are_zeros ? at::_efficientzerotensor(gradient.sizes(), gradient.options())
                         : gradient.clone();
      });
      Ddp ddp(net, world.group(), {.lanes = 8});
      for (Lane lane : ddp.lanes(StepKey{})) net.loss(lane.index).backward();
      return gradients_hash(net);
    });
  }
}

TEST(LanesOfDdp, UnusedErrorNamesWhatSomeLaneDoesNotReach) {
  for (const int ranks : {1, 3}) {
    spawn(ranks, [](World& world) {
      LaneNet net;
      Ddp ddp(net, world.group(), {.unused = Unused::Error, .lanes = 8});
      const auto text = message_of<ConfigError>([&] {
        for (Lane lane : ddp.lanes(StepKey{})) net.loss(lane.index).backward();
      });
      EXPECT_THAT(text, HasSubstr("'second.weight'"));
      EXPECT_THAT(text, HasSubstr("'never.weight'"));
      EXPECT_THAT(text, testing::Not(HasSubstr("'first.weight'")));
    });
  }
}

TEST(LanesOfDdp, OfTwoModelsInOneLoopAndInTwo) {
  expect_one_result([](World& world) {
    LaneNet one, two;
    Ddp first(one, world.group(), {.lanes = 8}), second(two, world.group(), {.lanes = 8});
    for (Lane lane : first.lanes(StepKey{}, second)) {
      (one.loss(lane.index) * two.loss(lane.index, 1)).backward();
    }
    uint64_t sum = test::chained(gradients_hash(one), gradients_hash(two));
    first.zero_grad();
    for (Lane lane : first.lanes(StepKey{}))
      (one.loss(lane.index) + two.loss(0).detach()).backward();
    second.zero_grad();
    for (Lane lane : second.lanes(StepKey{})) two.loss(lane.index, 2).backward();
    return test::chained(sum, test::chained(gradients_hash(one), gradients_hash(two)));
  });
}

TEST(LanesOfDdp, DrawByStepAndLaneAndLeaveOtherDrawsAlone) {
  expect_one_result([](World& world) {
    seed_everything(5, world.group());
    LaneNet net;
    Ddp ddp(net, world.group(), {.lanes = 8});
    LaneMean drawn(ddp);
    uint64_t sum = 1;
    for (int step = 0; step < 2; ++step) {
      ddp.zero_grad();
      for (Lane lane : ddp.lanes(StepKey{.seed = 1, .step = step})) {
        drawn.add(at::randn({1}, at::kDouble));
        net.loss(lane.index).backward();
      }
      sum = test::chained(sum, parallel::fingerprint(at::tensor({drawn.mean()}, at::kDouble)));
      sum = test::chained(sum, parallel::fingerprint(at::randn({2})));
    }
    return sum;
  });
}

TEST(LanesOfDdp, BuffersAreTheFirstLanesOrTheAverageOverAll) {
  for (const auto mode : {Buffers::Broadcast, Buffers::Average}) {
    expect_one_result([&](World& world) {
      torch::manual_seed(2);
      torch::nn::Sequential net(torch::nn::Linear(5, 4), torch::nn::BatchNorm1d(4));
      Ddp ddp(net, world.group(), {.buffers = mode, .lanes = 8});
      for (int step = 0; step < 2; ++step) {
        ddp.zero_grad();
        for (Lane lane : ddp.lanes(StepKey{})) {
          net->forward(test::drawn({6, 5}, static_cast<uint64_t>(lane.index)))
              .square()
              .mean()
              .backward();
        }
      }
      torch::manual_seed(2);
      torch::nn::Sequential alone(torch::nn::Linear(5, 4), torch::nn::BatchNorm1d(4));
      for (int step = 0; step < 2; ++step) alone->forward(test::drawn({6, 5}, 0));
      EXPECT_EQ(net->buffers()[0].equal(alone->buffers()[0]), mode == Buffers::Broadcast);
      EXPECT_EQ(net->buffers()[2].item<int64_t>(), 2);
      return test::lane_hash(*net);
    });
  }
}

// A checkpoint of one step before: the lanes lead from its count to just what the last step left.
TEST(LanesOfDdp, EachLaneBeginsWithTheBuffersThatWereLoaded) {
  expect_one_result([](World& world) {
    torch::manual_seed(2);
    torch::nn::Sequential net(torch::nn::Linear(5, 4), torch::nn::BatchNorm1d(4));
    net->to(at::kDouble);
    Ddp ddp(net, world.group(), {.buffers = Buffers::Average, .lanes = 8});
    const at::Tensor count = net->buffers()[2];
    const auto run = [&](int64_t own_fails) {
      int64_t own = 0;
      ddp.zero_grad();
      for (Lane lane : ddp.lanes(StepKey{})) {
        const auto x = test::drawn({6, 5}, static_cast<uint64_t>(lane.index)).to(at::kDouble);
        const auto y = net->forward(x);
        if (own++ == own_fails) throw DataError("no such sample");
        y.square().mean().backward();
      }
    };
    run(-1);
    EXPECT_EQ(count.item<double>(), 1);
    count.zero_();
    run(-1);
    EXPECT_EQ(count.item<double>(), 1);
    count.zero_();
    EXPECT_EQ(message_of<DataError>([&] { run(0); }), "no such sample");
    ddp.zero_grad();
    EXPECT_EQ(count.item<double>(), 0);
    run(-1);
    return test::lane_hash(*net);
  });
}

TEST(LanesOfDdp, GlobalMeanAndAScalerCountLanes) {
  expect_one_result([](World& world) {
    LaneNet net;
    Ddp ddp(net, world.group(), {.lanes = 8});
    torch::optim::SGD sgd(net.parameters(), 0.1);
    GlobalMean mean(world.group());
    GradScaler scaler(world.group(), {.init_scale = 8, .growth_interval = 1});
    uint64_t sum = 1;
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      net.table->weight.mutable_grad() = at::Tensor();
      for (Lane lane : ddp.lanes(StepKey{.step = step})) {
        auto loss = net.second(net.first(test::drawn({lane.index + 1, 5}, 3))).square().sum();
        if (step == 1 && lane.index == 5) loss = loss * INFINITY;
        scaler.scale(loss).backward();
        mean.add(lane.index + 1);
      }
      scaler.unscale_(sgd);
      EXPECT_EQ(mean.scale_gradients_(net.parameters()), 36);
      scaler.step(sgd);
      scaler.update();
      sum = test::chained(sum, test::lane_hash(net));
    }
    // 8, twice, half of it after the overflow, twice.
    EXPECT_EQ(scaler.factor(), 16);
    return sum;
  });
}

// One process, whose lanes are all there are: the mean over all samples.
TEST(LanesOfDdp, GlobalMeanIsTheMeanOverAllSamples) {
  spawn(2, [](World& world) {
    LaneNet net, whole;
    Ddp ddp(net, world.group(), {.lanes = 8});
    GlobalMean mean(world.group());
    at::Tensor sum;
    for (Lane lane : ddp.lanes(StepKey{})) {
      net.second(net.first(test::drawn({lane.index + 1, 5}, 3))).square().sum().backward();
      mean.add(lane.index + 1);
    }
    mean.scale_gradients_(net.parameters());
    for (int64_t lane = 0; lane < 8; ++lane) {
      const auto part =
          whole.second(whole.first(test::drawn({lane + 1, 5}, 3))).square().sum() / 36;
      sum = sum.defined() ? sum + part : part;
    }
    sum.backward();
    EXPECT_TRUE(net.first->weight.grad().allclose(whole.first->weight.grad(), 1e-4, 1e-6));
  });
}

TEST(LanesOfDdp, AnExceptionInALaneEndsTheStepAndTheNextBeginsAnew) {
  spawn(2, [](World& world) {
    LaneNet net;
    Ddp ddp(net, world.group(), {.lanes = 8});
    const auto run = [&](int64_t fails_in) {
      for (Lane lane : ddp.lanes(StepKey{})) {
        if (lane.index % 4 == fails_in) throw DataError("no such sample");
        net.loss(lane.index).backward();
      }
    };
    EXPECT_EQ(message_of<DataError>([&] { run(2); }), "no such sample");
    ddp.zero_grad();
    run(-1);
    const auto after = gradients_hash(net);
    ddp.zero_grad();
    for (auto& parameter : net.parameters()) parameter.mutable_grad() = at::Tensor();
    run(-1);
    EXPECT_EQ(gradients_hash(net), after);
  });
}

TEST(LanesOfDdp, AStepThatWasNotFinishedLeavesBuffersAsItBegan) {
  expect_one_result([](World& world) {
    torch::manual_seed(2);
    torch::nn::Sequential net(torch::nn::Linear(5, 4), torch::nn::BatchNorm1d(4));
    Ddp ddp(net, world.group(), {.lanes = 8});
    const auto run = [&](int64_t own_fails) {
      int64_t own = 0;
      for (Lane lane : ddp.lanes(StepKey{})) {
        const auto y = net->forward(test::drawn({6, 5}, static_cast<uint64_t>(lane.index)));
        if (own++ == own_fails) throw DataError("no such sample");
        y.square().mean().backward();
      }
    };
    EXPECT_EQ(message_of<DataError>([&] { run(0); }), "no such sample");
    ddp.zero_grad();
    run(-1);
    EXPECT_EQ(net->buffers()[2].item<int64_t>(), 1);
    return test::lane_hash(*net);
  });
}

}  // namespace
}  // namespace lockstep
