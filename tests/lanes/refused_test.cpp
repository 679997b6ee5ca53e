// What is refused of a program with lanes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "lanes/net.h"
#include "lockstep/parallel/averager.h"
#include "lockstep/parallel/hooks.h"
#include "lockstep/parallel/join.h"
#include "lockstep/parallel/lr_scheduler.h"
#include "lockstep/parallel/metrics.h"
#include "lockstep/parallel/sync_batch_norm.h"
#include "lockstep/parallel/update_batch_norm.h"
#include "support/thrown.h"

namespace lockstep {
namespace {

using test::LaneNet;
using test::message_of;
using test::spawn;
using testing::HasSubstr;

// What a rank finds wrong all are told.
void expect_refused(const std::string& what, const DdpOptions& options,
                    const std::function<void(LaneNet&, Ddp&)>& program) {
  for (const int ranks : {1, 3}) {
    spawn(ranks, [&](World& world) {
      LaneNet net;
      Ddp ddp(net, world.group(), options);
      EXPECT_THAT(message_of<ConfigError>([&] { program(net, ddp); }), HasSubstr(what));
      // And after it all is well.
      ddp.zero_grad();
      for (Lane lane : ddp.lanes(StepKey{})) net.loss(lane.index).backward();
      EXPECT_TRUE(net.first->weight.grad().defined());
    });
  }
}

TEST(LanesRefuse, ABackwardOutsideOfALane) {
  expect_refused("backward() outside of a lane", {.lanes = 8},
                 [](LaneNet& net, Ddp&) { net.loss(0).backward(); });
  expect_refused("backward() outside of a lane", {.lanes = 8}, [](LaneNet& net, Ddp& ddp) {
    {
      const auto hold = ddp.hold();
      net.loss(0).backward();
    }
    for (Lane lane : ddp.lanes(StepKey{})) net.loss(lane.index).backward();
  });
}

// Two trainings in two threads: their dropout would come from one generator.
TEST(LanesRefuse, ALoopWhileAnotherThreadIsInOne) {
  test::isolated([] {
    LaneNet net, other;
    Ddp ddp(net, Group(), {.lanes = 2}), its(other, Group(), {.lanes = 2});
    const auto train_other = [&] {
      its.zero_grad();
      for (Lane lane : its.lanes(StepKey{})) other.loss(lane.index).backward();
    };
    for (Lane lane : ddp.lanes(StepKey{})) {
      std::thread([&] {
        EXPECT_THAT(message_of<ConfigError>(train_other), HasSubstr("while another thread"));
      }).join();
      net.loss(lane.index).backward();
    }
    std::thread(train_other).join();
    EXPECT_TRUE(other.first->weight.grad().defined());
  });
}

TEST(LanesRefuse, ALaneWithoutABackwardAndOneWithTwo) {
  expect_refused("lane 1 of 8 of the step has had no backward()", {.lanes = 8},
                 [](LaneNet& net, Ddp& ddp) {
                   for (Lane lane : ddp.lanes(StepKey{})) {
                     if (lane.index != 1) net.loss(lane.index).backward();
                   }
                 });
  expect_refused("a second backward() in lane 0 of 8", {.lanes = 8}, [](LaneNet& net, Ddp& ddp) {
    for (Lane lane : ddp.lanes(StepKey{})) {
      net.loss(lane.index).backward();
      net.loss(lane.index).backward();
    }
  });
}

// What had arrived of the first is in sums: in a lane that adds to another's it would count twice.
TEST(LanesRefuse, ABackwardAfterOneThatThrewInTheSameLane) {
  for (const int64_t fails_in : {0, 1}) {  // not in any rank's last lane
    expect_refused("after one that threw, leave the loop and begin the step again", {.lanes = 9},
                   [&](LaneNet& net, Ddp& ddp) {
                     int64_t own = 0;
                     for (Lane lane : ddp.lanes(StepKey{})) {
                       if (own++ == fails_in) {
                         const auto hook =
                             net.first->weight.register_hook([](const at::Tensor&) -> at::Tensor {
                               throw std::runtime_error("a");
                             });
                         EXPECT_THROW(net.loss(lane.index).backward(), std::runtime_error);
                         net.first->weight.remove_hook(hook);
                       }
                       net.loss(lane.index).backward();
                     }
                   });
  }
}

TEST(LanesRefuse, AStepAfterAnExceptionUntilZeroGradOfTheDdpItself) {
  expect_refused("after an exception ddp.zero_grad()", {.lanes = 8}, [](LaneNet& net, Ddp& ddp) {
    EXPECT_THROW(
        {
          for (Lane lane : ddp.lanes(StepKey{})) {
            net.loss(lane.index).backward();
            throw std::runtime_error("a broken batch");
          }
        },
        std::runtime_error);
    torch::optim::SGD(net.parameters(), 0.1).zero_grad();
    for (Lane lane : ddp.lanes(StepKey{})) net.loss(lane.index).backward();
  });
}

TEST(LanesRefuse, ZeroGradInALane) {
  expect_refused("zero_grad() in lane", {.lanes = 8}, [](LaneNet& net, Ddp& ddp) {
    for (Lane lane : ddp.lanes(StepKey{})) {
      ddp.zero_grad();
      net.loss(lane.index).backward();
    }
  });
}

TEST(LanesRefuse, AnotherNumberOfThreads) {
  expect_refused("computes with 2 threads now", {.lanes = 8}, [](LaneNet& net, Ddp& ddp) {
    at::set_num_threads(2);
    for (Lane lane : ddp.lanes(StepKey{})) {
      at::set_num_threads(1);
      net.loss(lane.index).backward();
    }
  });
}

TEST(LanesRefuse, WhatIsNoFunctionOfLanes) {
  spawn(2, [](World& world) {
    LaneNet net;
    const Group& group = world.group();
    const auto refused = [&](DdpOptions options) {
      return message_of<ConfigError>([&] { Ddp ddp(net, group, std::move(options)); });
    };
    EXPECT_THAT(refused({.lanes = 1}), HasSubstr("lanes = 1 on 2 ranks"));
    EXPECT_THAT(refused({.lanes = 8, .threads = 0}), HasSubstr("threads = 0"));
    EXPECT_THAT(refused({.reduce_dtype = at::kDouble, .lanes = 8}), HasSubstr("reduce_dtype"));
    EXPECT_THAT(refused({.hook = std::make_shared<parallel::CastHook>(at::kBFloat16), .lanes = 8}),
                HasSubstr("together with the hook"));
    EXPECT_THAT(refused({.lanes = 8, .threads = 1 + world.rank()}),
                HasSubstr("threads: 2 here, 1 there"));
    EXPECT_THAT(refused({.lanes = 8 + world.rank()}), HasSubstr("lanes: 9 here, 8 there"));
    at::globalContext().setFlushDenormal(world.rank() == 1);
    EXPECT_THAT(refused({.lanes = 8}), HasSubstr("arithmetic: denormals flushed here"));
    at::globalContext().setFlushDenormal(false);
    torch::nn::Sequential norms(torch::nn::Linear(5, 4), torch::nn::BatchNorm1d(4));
    torch::nn::Sequential synchronous(torch::nn::Linear(5, 4), torch::nn::BatchNorm1d(4));
    parallel::convert_sync_batch_norm(synchronous, group);
    EXPECT_THAT(message_of<ConfigError>(
                    [&] { Ddp ddp(norms, group, {.buffers = Buffers::None, .lanes = 8}); }),
                HasSubstr("Buffers::None together with lanes"));
    Ddp ddp(norms, group, {.buffers = Buffers::Average, .lanes = 8});
    EXPECT_THAT(message_of<ConfigError>([&] { ddp.sync_buffers(); }), HasSubstr("sync_buffers()"));
    EXPECT_THAT(message_of<ConfigError>([&] { parallel::Join join({ddp}); }),
                HasSubstr("a Ddp with lanes cannot be joined"));
    const Ddp plain(net, group);
    EXPECT_THAT(message_of<ConfigError>([&] { (void)ddp.lanes(StepKey{}, plain); }),
                HasSubstr("has no lanes"));
    const at::Tensor one = at::ones({});
    EXPECT_THAT(message_of<ConfigError>([&] { parallel::global_loss(one, group); }),
                HasSubstr("use LaneMean"));
    EXPECT_THAT(message_of<ConfigError>(
                    [&] { parallel::clip_grad_norm_(norms->parameters(), 1, {.group = group}); }),
                HasSubstr("leave out ClipOptions::group"));
    parallel::Averager averager(net, {{.group = group, .period = 1}});
    EXPECT_THAT(message_of<ConfigError>([&] { averager.step(); }), HasSubstr("leave it out"));
    torch::optim::SGD sgd(net.parameters(), 0.1);
    parallel::ReduceLrOnPlateau plateau(sgd, group);
    EXPECT_EQ(plateau.step(0.1), 0.1);
    EXPECT_THAT(message_of<ConfigError>([&] { plateau.step(world.rank()); }),
                HasSubstr("give LaneMean::mean()"));
    EXPECT_THAT(message_of<ConfigError>([&] { Ddp another(net, group, {.lanes = 4}); }),
                HasSubstr("another model of this group has 8"));
    EXPECT_THAT(message_of<ConfigError>([&] { Ddp sync(synchronous, group, {.lanes = 8}); }),
                HasSubstr("SyncBatchNorm together with lanes"));
    EXPECT_THAT(message_of<ConfigError>([&] { convert_sync_batch_norm(norms, group); }),
                HasSubstr("the ranks of this group run 8 lanes"));
    EXPECT_THAT(message_of<ConfigError>([&] { update_batch_norm(*norms, group, [] {}); }),
                HasSubstr("call it with World::solo()"));
    norms->push_back(SyncBatchNorm1d(torch::nn::BatchNormOptions(4)));
    EXPECT_THAT(message_of<ConfigError>([&] { ddp.refresh(); }),
                HasSubstr("SyncBatchNorm together with lanes"));
  });
}

// A generator's statistics, where the discriminator's loop runs it.
TEST(LanesRefuse, BuffersThatTheLanesOfAnotherLoopHaveChanged) {
  spawn(3, [](World& world) {
    torch::nn::Sequential made(torch::nn::Linear(5, 4), torch::nn::BatchNorm1d(4));
    torch::nn::Sequential judged(torch::nn::Linear(4, 1));
    Ddp maker(made, world.group(), {.lanes = 8}), judge(judged, world.group(), {.lanes = 8});
    const auto make = [&] { return made->forward(torch::randn({6, 5})); };
    const auto judge_step = [&] {
      judge.zero_grad();
      for (Lane lane : judge.lanes(StepKey{.step = 1})) {
        (void)lane;
        judged->forward(make().detach()).mean().backward();
      }
    };
    const auto maker_step = [&] {
      maker.zero_grad();
      for (Lane lane : maker.lanes(StepKey{.step = 2}, judge)) {
        (void)lane;
        judged->forward(make()).mean().backward();
      }
    };
    judge_step();
    EXPECT_THAT(message_of<ConfigError>(maker_step),
                HasSubstr("buffer '1.running_mean' was another one on rank 1 than on rank 0"));
    maker.sync_buffers();
    maker_step();
    made->eval();
    judge_step();
    made->train();
    maker_step();
    EXPECT_EQ(world.group().all_gather_bytes(std::to_string(maker.fingerprint())),
              std::vector<std::string>(3, std::to_string(maker.fingerprint())));
  });
}

}  // namespace
}  // namespace lockstep
