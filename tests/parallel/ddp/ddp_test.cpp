// N ranks are one process on the concatenated batch.
#include "lockstep/parallel/ddp.h"

#include "lockstep/parallel/fused_adam.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

class DdpWorlds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DdpWorlds, ::testing::ValuesIn(kWorlds),
                         ::testing::PrintToStringParamName());

at::Tensor loss(Mlp& net, int rank) { return square_loss(net, rank); }

TEST_P(DdpWorlds, B02_GradientsAreTheTreeAverageBitForBit) {
  spawn(GetParam(), [](World& world) { expect_averages(world, make_mlp, loss); });
}

// The products sum over rows in another grouping: float32 rounding of sums of 4 * W terms below 1.
TEST_P(DdpWorlds, B02_GradientsAreThoseOfOneProcessOnTheWholeBatch) {
  spawn(GetParam(), [](World& world) {
    std::vector<at::Tensor> batch;
    for (int rank = 0; rank < world.size(); ++rank) batch.push_back(input(rank));
    Mlp whole, net;
    whole.forward(at::cat(batch)).square().mean().backward();
    Ddp ddp(net, world.group());
    loss(net, world.rank()).backward();
    for (size_t i = 0; i < net.parameters().size(); ++i) {
      EXPECT_TRUE(
          at::allclose(net.parameters()[i].grad(), whole.parameters()[i].grad(), 1e-5, 1e-7));
    }
  });
}

std::vector<at::Tensor> trained(World& world, DdpOptions options) {
  Mlp net;
  Ddp ddp(net, world.group(), options);
  FusedAdam adam(net.parameters(), 1e-2);
  for (int step = 0; step < 5; ++step) {
    ddp.zero_grad();
    square_loss(net, world.rank(), step).backward();
    adam.step();
  }
  return net.parameters();
}

TEST_P(DdpWorlds, B11_BucketSizesDoNotChangeTheBitsOfATraining) {
  spawn(GetParam(), [](World& world) {
    const auto usual = trained(world, {});
    expect_equal(trained(world, {.bucket_bytes = {1, 1}}), usual);
    expect_equal(trained(world, {.bucket_bytes = {100, 300}}), usual);
  });
}

// Every rank's end is compared with the same loop without Ddp, on the average of all ranks'
// gradients.
TEST_P(DdpWorlds, B16_RanksEndWithTheParametersOfOneProcess) {
  spawn(GetParam(), [](World& world) {
    Mlp whole;
    FusedAdam adam(whole.parameters(), 1e-2);
    for (int step = 0; step < 5; ++step) {
      std::vector<std::vector<at::Tensor>> by_parameter(whole.parameters().size());
      for (int rank = 0; rank < world.size(); ++rank) {
        whole.zero_grad();
        square_loss(whole, rank, step).backward();
        for (size_t i = 0; i < by_parameter.size(); ++i) {
          by_parameter[i].push_back(gradients(whole)[i].clone());
        }
      }
      for (size_t i = 0; i < by_parameter.size(); ++i) {
        whole.parameters()[i].mutable_grad() = tree_sum(by_parameter[i]) / world.size();
      }
      adam.step();
    }
    expect_equal(trained(world, {}), whole.parameters());
  });
}

TEST(Ddp, B01_ParametersAndBuffersStartAsThoseOfRankZero) {
  spawn(2, [](World& world) {
    Mlp net(world.rank() + 7);
    net.register_buffer("count", at::full({3}, 40 + world.rank(), at::kLong));
    Ddp ddp(net, world.group());
    Mlp first(7);
    for (size_t i = 0; i < 6; ++i) {
      EXPECT_TRUE(at::equal(net.parameters()[i], first.parameters()[i]));
    }
    EXPECT_TRUE(at::equal(net.buffers()[0], at::full({3}, 40, at::kLong)));
  });
}

TEST(Ddp, NamesAndTypeOfTheModuleStay) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    EXPECT_EQ(net.named_parameters().keys()[0], "first.weight");
  });
}

TEST(Ddp, AGroupOfOneCostsNothing) {
  spawn(1, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    EXPECT_TRUE(ddp.buckets().empty());
    const auto accumulator = torch::autograd::impl::grad_accumulator(net.parameters()[0]);
    EXPECT_TRUE(accumulator->pre_hooks().empty());
    EXPECT_TRUE(accumulator->post_hooks().empty());
    loss(net, 0).backward();
    ddp.zero_grad();
    EXPECT_FALSE(net.parameters()[0].grad().defined());
  });
}

TEST(Ddp, B35_TwoBackwardsWithoutZeroGradAddUp) {
  spawn(3, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    square_loss(net, world.rank(), 0).backward();
    const auto first =
        average_gradients(3, make_mlp, [](Mlp& m, int r) { return square_loss(m, r, 0); });
    const auto second =
        average_gradients(3, make_mlp, [](Mlp& m, int r) { return square_loss(m, r, 1); });
    expect_equal(gradients(net), first);
    square_loss(net, world.rank(), 1).backward();
    for (size_t i = 0; i < first.size(); ++i) {
      EXPECT_TRUE(at::allclose(gradients(net)[i], first[i] + second[i], 1e-5, 1e-7));
    }
  });
}

TEST(Ddp, TwoModelsShareAGroupAndABackward) {
  spawn(2, [](World& world) {
    Mlp left(1), right(2);
    Ddp ddp_left(left, world.group()), ddp_right(right, world.group());
    (square_loss(left, world.rank()) + 2 * square_loss(right, world.rank())).backward();
    square_loss(right, world.rank(), 1).backward();
    const auto average = [](uint64_t seed, auto loss_of) {
      return average_gradients(
          2, [seed] { return std::make_shared<Mlp>(seed); }, loss_of);
    };
    expect_equal(gradients(left), average(1, loss));
    const auto one = average(2, [](Mlp& m, int r) { return 2 * square_loss(m, r); });
    const auto two = average(2, [](Mlp& m, int r) { return square_loss(m, r, 1); });
    for (size_t i = 0; i < one.size(); ++i) {
      EXPECT_TRUE(at::allclose(gradients(right)[i], one[i] + two[i], 1e-5, 1e-7));
    }
  });
}

TEST(Ddp, B61_AfterDestructionTheModuleIsPlain) {
  spawn(2, [](World& world) {
    Mlp net;
    {
      Ddp ddp(net, world.group());
      loss(net, world.rank()).backward();
    }
    expect_equal(gradients(net), average_gradients(2, make_mlp, loss));
    net.zero_grad();
    loss(net, world.rank()).backward();
    Mlp plain;
    loss(plain, world.rank()).backward();
    expect_equal(gradients(net), gradients(plain));
  });
}

TEST(Ddp, B61_ASecondDdpMayFollowAFirst) {
  spawn(2, [](World& world) {
    Mlp net;
    { Ddp first(net, world.group()); }
    Ddp second(net, world.group());
    loss(net, world.rank()).backward();
    expect_equal(gradients(net), average_gradients(2, make_mlp, loss));
  });
}

TEST(Ddp, B62_AModuleMovesToAnotherGroup) {
  spawn(4, [](World& world) {
    const Group pair = world.group().split(world.rank() / 2);
    Mlp net;
    {
      Ddp ddp(net, world.group());
      square_loss(net, world.rank()).backward();
    }
    Ddp ddp(net, pair);
    ddp.zero_grad();
    square_loss(net, world.rank()).backward();
    Mlp first, second;
    square_loss(first, world.rank() / 2 * 2).backward();
    square_loss(second, world.rank() / 2 * 2 + 1).backward();
    for (size_t i = 0; i < gradients(net).size(); ++i) {
      EXPECT_TRUE(at::equal(gradients(net)[i], (gradients(first)[i] + gradients(second)[i]) / 2))
          << i;
    }
  });
}

}  // namespace
}  // namespace lockstep::test
