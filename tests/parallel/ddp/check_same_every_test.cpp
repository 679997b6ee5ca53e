// DdpOptions::check_same_every: ranks that drift apart are told by a backward().
#include <cstdlib>

#include "core/flight/segment.h"
#include "lockstep/parallel/check_same.h"
#include "lockstep/parallel/hooks.h"
#include "lockstep/parallel/join.h"
#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::optim::SGD;
using torch::optim::SGDOptions;

void take_step(Mlp& net, torch::optim::Optimizer& optimizer, int rank, int step) {
  optimizer.zero_grad();
  square_loss(net, rank, step).backward();
  optimizer.step();
}

TEST(CheckSameEvery, TheThirdBackwardTellsWhoHasDriftedAndWhere) {
  for (const std::string backend : {"shm", "gloo"}) {
    spawn(3,
          [](World& world) {
            Mlp net;
            Ddp ddp(net, world, {.check_same_every = 3});
            SGD sgd(net.parameters(), SGDOptions(0.1));
            int done = 0;
            const auto message = message_of<ConfigError>([&] {
              for (int step = 0; step < 5; ++step) {
                take_step(net, sgd, world.rank(), step);
                ++done;
                if (step == 0 && world.rank() == 1) net.second->bias.data()[3] += 1e-6;
              }
            });
            EXPECT_EQ(done, 2);
            EXPECT_THAT(message, AllOf(HasSubstr("pass 3 of Ddp 1"),
                                       HasSubstr("rank 1 differs from rank 0 (3 ranks)"),
                                       HasSubstr("first in parameter 'second.bias'")));
          },
          {.backend = backend});
  }
}

TEST(CheckSameEvery, AnOptimizerIsComparedWhenItIsIncluded) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world, {.ignore = {"third.bias"}, .check_same_every = 1});
    SGD sgd(net.parameters(), SGDOptions(0.1).momentum(0.9));
    // The momentum of what is ignored is each rank's own.
    ddp.include_in_check(sgd);
    for (int step = 0; step < 3; ++step) take_step(net, sgd, world.rank(), step);
    ddp.refresh();  // keeps it
    if (world.rank() == 1) sgd.param_groups()[0].options().set_lr(0.2);
    EXPECT_THAT(message_of<ConfigError>([&] { take_step(net, sgd, world.rank(), 3); }),
                HasSubstr("first in the optimizer's options of group 0 (learning rate 0.1)"));
    SGD other(net.parameters(), SGDOptions(0.1));
    ddp.include_in_check(other);
    take_step(net, other, world.rank(), 4);
  });
}

TEST(CheckSameEvery, WhatIsEachRanksOwnIsNotCompared) {
  spawn(2, [](World& world) {
    Mlp net;
    const at::Tensor mean = net.register_buffer("mean", at::zeros({3}));
    Ddp ddp(net, world,
            {.buffers = Buffers::None, .ignore = {"third.bias"}, .check_same_every = 1});
    SGD sgd(net.parameters(), SGDOptions(0.1));
    for (int step = 0; step < 3; ++step) {
      mean.add_(world.rank());
      take_step(net, sgd, world.rank(), step);
    }
    EXPECT_EQ(ddp.log().pass_count, 3);
  });
}

TEST(CheckSameEvery, OnlyPassesThatCommunicateCount) {
  spawn(2, [](World& world) {
    Mlp net;
    // The second step is the last that communicates.
    const auto local = std::make_shared<LocalSgd>(LocalSgdOptions{.start_iteration = 2});
    Ddp ddp(net, world, {.hook = local, .check_same_every = 1});
    SGD sgd(net.parameters(), SGDOptions(0.1));
    for (int step = 0; step < 5; ++step) take_step(net, sgd, world.rank(), step);

    Mlp other;
    Ddp held(other, world, {.check_same_every = 2});
    const auto message = message_of<ConfigError>([&] {
      for (int step = 0; step < 3; ++step) {
        {
          const auto hold = held.hold();
          square_loss(other, world.rank(), step).backward();
        }
        if (world.rank() == 1) other.second->bias.data()[3] += 1e-3;
        square_loss(other, world.rank(), step).backward();
      }
    });
    EXPECT_THAT(message, HasSubstr("pass 2 of Ddp 2"));
  });
}

// A rank without a batch makes no step until finish().
TEST(CheckSameEvery, WithinAJoinOnlyStepsOfAllRanksCount) {
  spawn(3, [](World& world) {
    Mlp net;
    Ddp ddp(net, world, {.check_same_every = 1});
    SGD sgd(net.parameters(), SGDOptions(0.1));
    Join join({ddp});
    for (int step = 0; step < 1 + world.rank(); ++step) take_step(net, sgd, world.rank(), step);
    join.finish();
    take_step(net, sgd, world.rank(), 5);
    if (world.rank() == 2) net.first->weight.data()[0][0] += 1;
    EXPECT_THAT(message_of<ConfigError>([&] { take_step(net, sgd, world.rank(), 6); }),
                HasSubstr("rank 2 differs from rank 0 (3 ranks)"));
  });
}

// As Glow's ActNorm does, which is the same on all ranks only before the Ddp.
TEST(CheckSameEvery, TheFirstBackwardComparesParametersInAnyCase) {
  spawn(2, [](World& world) {
    for (const bool late : {false, true}) {
      Mlp net;
      const auto set_from_batch = [&] {
        const at::NoGradGuard no_grad;
        net.second->bias.fill_(world.rank());
      };
      if (!late) set_from_batch();
      Ddp ddp(net, world);
      SGD sgd(net.parameters(), SGDOptions(0.1));
      if (late) set_from_batch();
      const auto message = message_of<ConfigError>([&] { take_step(net, sgd, world.rank(), 0); });
      if (late) {
        EXPECT_THAT(message, AllOf(HasSubstr("first in parameter 'second.bias'"),
                                   HasSubstr("goes before the Ddp")));
      } else {
        EXPECT_EQ(message, "nothing");
      }
    }
  });
}

// Sharpness-aware minimisation, each rank by its own gradient (Foret et al., ICLR 2021).
void take_perturbed_step(Mlp& net, Ddp& ddp, torch::optim::Optimizer& optimizer, int rank) {
  ddp.zero_grad();
  {
    const auto hold = ddp.hold();
    square_loss(net, rank, 0).backward();
  }
  std::vector<at::Tensor> before;
  const auto each = [&](const auto& act) {
    const at::NoGradGuard no_grad;
    for (const auto& p : net.parameters()) act(p);
  };
  each([&](const at::Tensor& p) {
    before.push_back(p.clone());
    if (p.grad().defined()) p.add_(p.grad(), 0.1);
  });
  ddp.zero_grad();
  square_loss(net, rank, 0).backward();
  size_t i = 0;
  each([&](const at::Tensor& p) { p.copy_(before[i++]); });
  optimizer.step();
}

TEST(CheckSameEvery, RanksMayPerturbParametersForTheirOwnBackwardWhereItComesLater) {
  spawn(2, [](World& world) {
    for (const int64_t every : {0, 100}) {
      Mlp net;
      Ddp ddp(net, world, {.check_same_every = every});
      SGD sgd(net.parameters(), SGDOptions(0.1));
      const auto message = message_of<ConfigError>([&] {
        for (int step = 0; step < 3; ++step) take_perturbed_step(net, ddp, sgd, world.rank());
      });
      if (every == 0) {
        EXPECT_THAT(message, HasSubstr("perturbs them for its own backward(), see DdpOptions"));
      } else {
        EXPECT_EQ(message, "nothing");
        check_same(net, sgd, world);
      }
    }
  });
}

TEST(CheckSameEvery, ANegativeNumberIsRefusedAndOneRankHasNothingToCompare) {
  spawn(1, [](World& world) {
    Mlp net;
    EXPECT_THAT(message_of<ConfigError>([&] { Ddp(net, world, {.check_same_every = -1}); }),
                HasSubstr("check_same_every = -1"));
    Ddp ddp(net, world, {.check_same_every = 1});
    SGD sgd(net.parameters(), SGDOptions(0.1));
    ddp.include_in_check(sgd);
    take_step(net, sgd, 0, 0);
  });
}

TEST(CheckSameEvery, TheFlightRecorderKeepsWhatTheLastComparisonFound) {
  const flight::Segment segment(2);
  setenv(flight::kVariable, std::to_string(segment.fd()).c_str(), 1);
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world, {.check_same_every = 2});
    SGD sgd(net.parameters(), SGDOptions(0.1));
    for (int step = 0; step < 5; ++step) take_step(net, sgd, world.rank(), step);
  });
  unsetenv(flight::kVariable);
  for (const int rank : {0, 1}) {
    const auto comparison = segment.read(rank).comparison;
    ASSERT_TRUE(comparison.has_value());
    EXPECT_EQ(comparison->text, "pass 4 of Ddp 1: the ranks are the same");
  }
}

}  // namespace
}  // namespace lockstep::test
