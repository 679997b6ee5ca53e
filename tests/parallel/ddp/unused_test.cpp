// Parameters that a backward does not reach.
#include "parallel/reference.h"
#include "support/spawn.h"

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

}  // namespace
}  // namespace lockstep::test
