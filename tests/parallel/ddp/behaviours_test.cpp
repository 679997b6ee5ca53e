// Rows of docs/ddp_behaviours.md on what a model may look like: Ddp does not wrap it, so whatever
// forward() is and returns, only gradients matter.
#include <map>
#include <sstream>
#include <tuple>

#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(DdpBehaviour, B19_AnUnusedParameterOfNestedModulesIsNamedByItsPath) {
  spawn(2, [](World& world) {
    torch::nn::Module outer;
    outer.register_module("block", std::make_shared<Mlp>());
    Ddp ddp(outer, world.group(), {.unused = Unused::Error});
    auto& net = *outer.named_children()["block"]->as<Mlp>();
    try {
      net.first(input(world.rank())).sum().backward();
      FAIL() << "accepted";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("'block.third.weight'"), HasSubstr("4 of 6"),
                                      Not(HasSubstr("'block.first"))));
    }
  });
}

// One layer called in three places, one of them on rank 0 only, beside one that no rank uses.
struct Recurrent : torch::nn::Module {
  Recurrent() {
    torch::manual_seed(0);
    layer = register_module("layer", torch::nn::Linear(6, 6));
    alias = register_module("alias", layer);
    idle = register_module("idle", torch::nn::Linear(6, 6));
  }
  torch::nn::Linear layer{nullptr}, alias{nullptr}, idle{nullptr};
};

TEST(DdpBehaviour, B22_ASharedLayerBesideUnusedOnes) {
  spawn(3, [](World& world) {
    const auto make = [] { return std::make_shared<Recurrent>(); };
    expect_averages(world, make, [](Recurrent& net, int rank) {
      auto x = net.alias(torch::tanh(net.layer(input(rank))));
      if (rank == 0) x = net.layer(torch::tanh(x));
      return x.square().mean();
    });
  });
}

TEST(DdpBehaviour, B24_RanksMayTakeDifferentBranchesInDifferentOrder) {
  spawn(3, [](World& world) {
    expect_averages(world, make_mlp, [](Mlp& net, int rank) {
      const auto x = torch::tanh(net.first(input(rank)));
      if (rank == 0) return net.third(x).square().mean();
      const auto y = net.second(x);
      return rank == 1 ? net.third(y).square().mean() : (net.third(x) * net.third(y)).mean();
    });
  });
}

struct Outputs {
  at::Tensor near, far;
  std::string note;
};

// What a model might return: a struct, a map, a tuple of vectors.
Outputs both_outputs(Mlp& net, int rank) {
  const auto x = torch::tanh(net.first(input(rank)));
  return {x, net.third(torch::tanh(net.second(x))), "anything"};
}

TEST(DdpBehaviour, B25_OutputsThatTheLossDoesNotUse) {
  spawn(2, [](World& world) {
    expect_averages(world, make_mlp, [](Mlp& net, int rank) {
      return both_outputs(net, rank).near.square().mean();
    });
    expect_averages(world, make_mlp, [](Mlp& net, int rank) {
      const Outputs outputs = both_outputs(net, rank);
      return rank == 0 ? outputs.near.sum() : outputs.far.sum();
    });
  });
}

TEST(DdpBehaviour, B26_ForwardsWhoseOutputIsIgnored) {
  spawn(2, [](World& world) {
    expect_averages(world, make_mlp, [](Mlp& net, int rank) {
      for (int i = 0; i <= rank; ++i) net.forward(input(rank, 7));
      return net.third(net.first(input(rank))).square().mean();
    });
  });
}

TEST(DdpBehaviour, B27_ForwardMayReturnAnything) {
  spawn(2, [](World& world) {
    expect_averages(world, make_mlp, [](Mlp& net, int rank) {
      const Outputs outputs = both_outputs(net, rank);
      const std::map<std::string, std::vector<at::Tensor>> nested{
          {"a", {outputs.near, outputs.far}}};
      const auto tuple = std::make_tuple(nested, outputs.note, 3);
      return std::get<0>(tuple).at("a")[1].square().mean() + std::get<0>(tuple).at("a")[0].mean();
    });
  });
}

TEST(DdpBehaviour, B28_AnOutputWithoutGradientPassesThrough) {
  spawn(2, [](World& world) {
    expect_averages(world, make_mlp, [](Mlp& net, int rank) {
      const auto fixed = input(rank);
      const auto y = net.forward(fixed);
      EXPECT_FALSE(fixed.requires_grad());
      return (y * fixed.sum() + net.forward(fixed).detach()).square().mean();
    });
  });
}

TEST(DdpBehaviour, B29_ANewLeafInForward) {
  spawn(2, [](World& world) {
    expect_averages(world, make_mlp, [](Mlp& net, int rank) {
      const auto leaf = torch::full({3}, 0.5, torch::requires_grad());
      return (net.forward(input(rank)) + leaf).square().mean();
    });
  });
}

// Each backward() is a pass of its own; what it does not reach keeps its gradient.
TEST(DdpBehaviour, B35_SeveralOutputsEachWithItsOwnBackward) {
  spawn(3, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    const auto run = [](Mlp& m, int rank) {
      const Outputs outputs = both_outputs(m, rank);
      return std::pair(outputs.near.square().mean(), outputs.far.square().mean());
    };
    const auto [near, far] = run(net, world.rank());
    far.backward({}, /*retain_graph=*/true);
    near.backward();
    const auto first =
        average_gradients(3, make_mlp, [&](Mlp& m, int r) { return run(m, r).first; });
    const auto second =
        average_gradients(3, make_mlp, [&](Mlp& m, int r) { return run(m, r).second; });
    for (size_t i = 0; i < first.size(); ++i) {
      const auto want = first[i].defined() ? first[i] + second[i] : second[i];
      EXPECT_TRUE(at::allclose(gradients(net)[i], want, 1e-5, 1e-7)) << i;
    }
  });
}

TEST(DdpBehaviour, B36_SeveralForwardsBeforeOneBackward) {
  spawn(2, [](World& world) {
    expect_averages(world, make_mlp, [](Mlp& net, int rank) {
      at::Tensor sum = at::zeros({});
      for (int step = 0; step < 3; ++step) sum = sum + square_loss(net, rank, step);
      return sum;
    });
  });
}

// A graph that changes after the buckets were built in the order of the first.
TEST(DdpBehaviour, B36_AGraphThatChangesIsNoError) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    for (int step = 0; step < 4; ++step) {
      const auto loss = [step](Mlp& m, int rank) {
        return step % 2 == 0 ? square_loss(m, rank, step)
                             : m.third(m.first(input(rank, step))).square().mean();
      };
      ddp.zero_grad();
      loss(net, world.rank()).backward();
      expect_equal(gradients(net), average_gradients(2, make_mlp, loss));
    }
  });
}

TEST(DdpBehaviour, B55_ParametersThatAreTransposedOrHaveGapsBetweenThem) {
  spawn(2, [](World& world) {
    const auto make = [] {
      auto net = make_mlp();
      net->second->weight.set_data(net->second->weight.t().contiguous().t());
      // Every second column of a wider matrix.
      net->third->weight.set_data(
          at::stack({net->third->weight, net->third->weight + 1}, 2).select(2, 0));
      return net;
    };
    expect_averages(world, make, [](Mlp& net, int rank) { return square_loss(net, rank); });
    auto net = make();
    Ddp ddp(*net, world.group());
    square_loss(*net, world.rank()).backward();
    EXPECT_EQ(net->third->weight.strides(), at::IntArrayRef({16, 2}));
    EXPECT_EQ(net->second->weight.grad().strides(), at::IntArrayRef({1, 8}));
    EXPECT_EQ(net->third->weight.grad().strides(), at::IntArrayRef({8, 1}));
    EXPECT_TRUE(at::equal(net->third->weight, make()->third->weight));
  });
}

// Names are the module's own, with or without Ddp: no prefix to strip.
TEST(DdpBehaviour, B63_ACheckpointPassesBetweenRanksAndAPlainModule) {
  spawn(2, [](World& world) {
    auto net = std::make_shared<Mlp>(world.rank());
    std::string file;
    {
      Ddp ddp(*net, world.group());
      torch::optim::SGD sgd(net->parameters(), 0.1);
      square_loss(*net, world.rank()).backward();
      sgd.step();
      std::ostringstream out;
      torch::save(net, out);
      file = world.group().broadcast_bytes(out.str());
    }
    auto plain = std::make_shared<Mlp>(9);
    std::istringstream in(file);
    torch::load(plain, in);
    ASSERT_EQ(plain->named_parameters().keys(), net->named_parameters().keys());
    for (size_t i = 0; i < 6; ++i) {
      EXPECT_TRUE(at::equal(plain->parameters()[i], net->parameters()[i]));
    }
    Ddp again(*plain, world.group());
    square_loss(*plain, world.rank(), 1).backward();
    EXPECT_TRUE(plain->first->weight.grad().defined());
  });
}

}  // namespace
}  // namespace lockstep::test
