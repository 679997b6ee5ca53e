// hold() accumulates without communication.
#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using ::testing::HasSubstr;

constexpr int kMicroBatches = 3;

at::Tensor sum_of_losses(Mlp& net, int rank) {
  at::Tensor sum = square_loss(net, rank, 0);
  for (int step = 1; step < kMicroBatches; ++step) sum = sum + square_loss(net, rank, step);
  return sum;
}

void expect_rounded(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::allclose(got[i], want[i], 1e-5, 1e-7));
}

class HoldWorlds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, HoldWorlds, ::testing::ValuesIn(kWorlds),
                         ::testing::PrintToStringParamName());

TEST_P(HoldWorlds, B32_B33_TheNextBackwardReducesTheSum) {
  spawn(GetParam(), [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    const auto want = average_gradients(world.size(), make_mlp, sum_of_losses);
    for (int round = 0; round < 2; ++round) {
      ddp.zero_grad();
      {
        const auto hold = ddp.hold();
        for (int step = 0; step + 1 < kMicroBatches; ++step) {
          square_loss(net, world.rank(), step).backward();
        }
      }
      square_loss(net, world.rank(), kMicroBatches - 1).backward();
      expect_rounded(gradients(net), want);
    }
  });
}

TEST(Hold, B32_GradientsUnderItAreThisRanksOwn) {
  spawn(2, [](World& world) {
    Mlp net, plain;
    Ddp ddp(net, world.group());
    const auto hold = ddp.hold();
    square_loss(net, world.rank()).backward();
    square_loss(plain, world.rank()).backward();
    expect_equal(gradients(net), gradients(plain));
  });
}

// Rank 0 alone accumulates first, so any communication under the guard would not be answered.
TEST(Hold, B32_RanksMayHoldDifferentNumbersOfBackwards) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    if (world.rank() == 0) {
      const auto hold = ddp.hold();
      square_loss(net, 0, 1).backward();
    }
    square_loss(net, world.rank(), 0).backward();
    expect_rounded(gradients(net), average_gradients(2, make_mlp, [](Mlp& m, int r) {
                     const auto loss = square_loss(m, r, 0);
                     return r == 0 ? loss + square_loss(m, r, 1) : loss;
                   }));
  });
}

TEST(Hold, TheLastGuardToGoEndsIt) {
  spawn(2, [](World& world) {
    Mlp net, plain;
    Ddp ddp(net, world.group());
    auto outer = std::make_unique<parallel::Hold>(ddp.hold());
    { const auto inner = ddp.hold(); }
    square_loss(net, world.rank()).backward();
    square_loss(plain, world.rank()).backward();
    expect_equal(gradients(net), gradients(plain));
    outer.reset();
    ddp.zero_grad();
    square_loss(net, world.rank()).backward();
    expect_equal(gradients(net),
                 average_gradients(2, make_mlp, [](Mlp& m, int r) { return square_loss(m, r); }));
  });
}

// Only the held backward reached the head; the reducing one does not.
TEST(Hold, WhatOnlyTheHeldBackwardReachedIsAveragedToo) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    const auto body = [](Mlp& m, int r) { return m.first(input(r)).square().mean(); };
    {
      const auto hold = ddp.hold();
      square_loss(net, world.rank()).backward();
    }
    body(net, world.rank()).backward();
    expect_rounded(gradients(net), average_gradients(2, make_mlp, [&](Mlp& m, int r) {
                     return square_loss(m, r) + body(m, r);
                   }));
  });
}

// Whether the others have frozen it, too, no rank is told.
TEST(Hold, FreezingAfterSomeRanksReachedAParameterIsRefused) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    const auto body = [&] { net.first(input(world.rank())).square().mean().backward(); };
    {
      const auto hold = ddp.hold();
      if (world.rank() == 0) square_loss(net, 0).backward();
    }
    net.second->weight.set_requires_grad(false);
    body();
    ddp.zero_grad();
    EXPECT_THAT(message_of<ConfigError>(body),
                HasSubstr("freeze it on all ranks, before the first backward() of a step"));
    ddp.zero_grad();
    body();
  });
}

}  // namespace
}  // namespace lockstep::test
