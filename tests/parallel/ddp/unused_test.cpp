// Parameters that a backward does not reach.
#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// The head is reached where `with_head` says so.
at::Tensor head_loss(Mlp& net, int rank, bool with_head) {
  auto hidden = torch::tanh(net.first(input(rank)));
  if (with_head) hidden = net.third(torch::tanh(net.second(hidden)));
  return hidden.square().mean();
}

at::Tensor only_rank_one(Mlp& net, int rank) { return head_loss(net, rank, rank == 1); }
at::Tensor nowhere(Mlp& net, int rank) { return head_loss(net, rank, false); }

class UnusedWorlds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, UnusedWorlds, ::testing::Values(2, 3, 4),
                         ::testing::PrintToStringParamName());

TEST_P(UnusedWorlds, B17_B20_UsedOnOneRankCountsAsZeroElsewhere) {
  spawn(GetParam(), [](World& world) { expect_averages(world, make_mlp, only_rank_one); });
}

TEST_P(UnusedWorlds, B20_B21_UsedNowhereStaysUndefined) {
  spawn(GetParam(), [](World& world) { expect_averages(world, make_mlp, nowhere); });
}

TEST_P(UnusedWorlds, B24_TheSetMayChangeFromStepToStep) {
  spawn(GetParam(), [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group(), {.bucket_bytes = {1, 200}});
    for (int step = 0; step < 4; ++step) {
      const auto here = [step](Mlp& m, int r) { return head_loss(m, r, (r + step) % 2 == 0); };
      ddp.zero_grad();
      here(net, world.rank()).backward();
      expect_equal(gradients(net), average_gradients(world.size(), make_mlp, here));
    }
  });
}

TEST_P(UnusedWorlds, B20_UsedNowhereKeepsTheGradientItHad) {
  spawn(GetParam(), [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    head_loss(net, world.rank(), true).backward();
    const auto before = gradients(net)[4].clone();
    nowhere(net, world.rank()).backward();
    EXPECT_TRUE(at::equal(gradients(net)[4], before));
  });
}

TEST(Unused, B20_UsedNowhereKeepsAGradientOfTheUsersOwn) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    const auto own = at::full({3}, 1.0 * world.rank());
    net.parameters()[5].mutable_grad() = own;
    nowhere(net, world.rank()).backward();
    EXPECT_TRUE(net.parameters()[5].grad().is_same(own));
    EXPECT_TRUE(at::equal(own, at::full({3}, 1.0 * world.rank())));
  });
}

// Averaged gradients are alike on all ranks, so the part of a rank that does not reach it now is
// what it was.
TEST(Unused, UsedOnOneRankAddsToTheGradientThatWasThere) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    head_loss(net, world.rank(), true).backward();
    const auto before = gradients(net)[4].clone();
    only_rank_one(net, world.rank()).backward();
    const auto more = average_gradients(2, make_mlp, only_rank_one)[4];
    EXPECT_TRUE(at::allclose(gradients(net)[4], before + more, 1e-5, 1e-7));
  });
}

TEST(Unused, B18_ErrorListsTheNamesOnEveryRank) {
  spawn(3, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group(), {.unused = Unused::Error});
    try {
      only_rank_one(net, world.rank()).backward();
      FAIL() << "accepted";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("'third.weight'"), HasSubstr("'second.bias'"),
                                      HasSubstr("4 of 6"), Not(HasSubstr("'first.weight'"))));
    }
    ddp.zero_grad();
    head_loss(net, world.rank(), true).backward();
    expect_equal(gradients(net), average_gradients(3, make_mlp, [](Mlp& m, int r) {
                   return head_loss(m, r, true);
                 }));
  });
}

TEST(Unused, B23_ErrorAcceptsAModelWithoutAny) {
  spawn(2, [](World& world) {
    expect_averages(world, make_mlp, [](Mlp& m, int r) { return head_loss(m, r, true); },
                    {.unused = Unused::Error});
  });
}

// The rank that has frozen it gets the others' average, which lacks its part.
TEST(Unused, FrozenOnOneRankOnlyIsRefusedOnAllRanksInTheNextBackward) {
  for (const auto unused : {Unused::Zero, Unused::Error}) {
    for (const int64_t lanes : {0, 2}) {
      spawn(2, [&](World& world) {
        Mlp net;
        Ddp ddp(net, world.group(), {.unused = unused, .lanes = lanes});
        const auto backward = [&] {
          ddp.zero_grad();
          if (lanes == 0) return square_loss(net, world.rank()).backward();
          for (const auto lane : ddp.lanes(parallel::StepKey{})) {
            square_loss(net, static_cast<int>(lane.index)).backward();
          }
        };
        backward();
        if (world.rank() == 1) net.second->bias.set_requires_grad(false);
        backward();
        net.second->bias.set_requires_grad(true);
        EXPECT_THAT(message_of<ConfigError>(backward),
                    AllOf(HasSubstr("[ddp] rank 1: parameter 'second.bias' is frozen on this rank"),
                          HasSubstr("freeze it on all ranks")));
        backward();
        expect_equal(gradients(net), average_gradients(2, make_mlp, square_loss_of_mlp));
      });
    }
  }
}

// Also between a forward and its backward, and for every second step only, as in a GAN.
TEST(Unused, FrozenOnAllRanksIsNotRefused) {
  for (const auto unused : {Unused::Zero, Unused::Error}) {
    spawn(2, [&](World& world) {
      Mlp net;
      Ddp ddp(net, world.group(), {.unused = unused});
      for (int step = 0; step < 4; ++step) {
        ddp.zero_grad();
        net.second->weight.set_requires_grad(step % 2 == 0);
        square_loss(net, world.rank()).backward();
        EXPECT_EQ(net.second->weight.grad().defined(), step % 2 == 0);
      }
      net.second->weight.set_requires_grad(true);
      const at::Tensor loss = square_loss(net, world.rank());
      net.second->weight.set_requires_grad(false);
      loss.backward();
      square_loss(net, world.rank()).backward();
    });
  }
}

}  // namespace
}  // namespace lockstep::test
