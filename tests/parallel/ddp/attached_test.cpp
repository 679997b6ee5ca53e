// A module that changes while Ddp is attached: it goes on right, or backward() throws on all ranks.
#include <sstream>

#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Which zero_grad() a program calls must not matter.
enum class Zero { Optimizers, Ddps };

class Attached : public ::testing::TestWithParam<Zero> {
 protected:
  static void zero(torch::nn::Module& net, Ddp& ddp) {
    if (GetParam() == Zero::Ddps) {
      ddp.zero_grad();
    } else {
      torch::optim::SGD(net.parameters(), 0.1).zero_grad();
    }
  }
};
INSTANTIATE_TEST_SUITE_P(ZeroGrad, Attached, ::testing::Values(Zero::Optimizers, Zero::Ddps),
                         [](const auto& test) {
                           return test.param == Zero::Ddps ? "OfDdp" : "OfTheOptimizer";
                         });

std::string refusal(Mlp& net, int rank) {
  return message_of<ConfigError>([&] { square_loss(net, rank).backward(); });
}

TEST_P(Attached, LoadedParametersAreAveraged) {
  spawn(2, [](World& world) {
    Mlp net, other(9);
    torch::optim::SGD sgd(net.parameters(), 0.1);
    Ddp ddp(net, world.group());
    square_loss(net, world.rank()).backward();
    const auto loss = [](Mlp& m, int r) { return square_loss(m, r); };
    const auto want = average_gradients(
        2, [] { return std::make_shared<Mlp>(9); }, loss);
    for (int times = 0; times < 2; ++times) {
      std::stringstream stream;
      torch::save(std::make_shared<Mlp>(other), stream);
      torch::serialize::InputArchive archive;
      archive.load_from(stream);
      net.load(archive);
      zero(net, ddp);
      square_loss(net, world.rank()).backward();
      expect_equal(gradients(net), want);
    }
  });
}

// The graph from before the load reaches the parameters by other nodes than the one from after it.
TEST_P(Attached, AGraphFromBeforeTheLoadIsAveragedToo) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    const auto sum = [](Mlp& m, int r) {
      at::Tensor all = at::zeros({});
      for (const auto& p : m.parameters()) all = all + (p * (r + 1.0)).sum();
      return all;
    };
    const auto before = sum(net, world.rank());
    std::stringstream stream;
    torch::save(net.first, stream);
    torch::load(net.first, stream);
    for (int times = 0; times < 2; ++times) {
      for (const auto& loss : {sum(net, world.rank()), before}) {
        zero(net, ddp);
        loss.backward({}, /*retain_graph=*/true);
        expect_equal(gradients(net), average_gradients(2, make_mlp, sum));
      }
    }
  });
}

TEST_P(Attached, AConvertedModuleIsRefusedUntilRefresh) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    square_loss(net, world.rank()).backward();
    net.to(at::kDouble);
    const auto loss = [](Mlp& m, int r) { return m.forward(input(r).to(at::kDouble)).sum(); };
    for (int times = 0; times < 2; ++times) {
      zero(net, ddp);
      EXPECT_THAT(message_of<ConfigError>([&] { loss(net, world.rank()).backward(); }),
                  AllOf(HasSubstr("rank 0: parameter 'first.weight' was float32 [8, 6] on cpu and "
                                  "was converted to float64"),
                        HasSubstr("refresh()")));
    }
    ddp.refresh();
    const auto make = [] {
      auto m = make_mlp();
      m->to(at::kDouble);
      return m;
    };
    for (int times = 0; times < 2; ++times) {
      zero(net, ddp);
      loss(net, world.rank()).backward();
      expect_equal(gradients(net), average_gradients(2, make, loss));
    }
  });
}

TEST_P(Attached, AParameterUnfrozenOnOneRankIsRefusedOnAll) {
  spawn(3, [](World& world) {
    Mlp net;
    net.second->weight.requires_grad_(false);
    Ddp ddp(net, world.group());
    square_loss(net, world.rank()).backward();
    if (world.rank() == 1) net.second->weight.requires_grad_(true);
    zero(net, ddp);
    EXPECT_THAT(refusal(net, world.rank()),
                HasSubstr("rank 1: parameter 'second.weight' was unfrozen"));
    net.second->weight.requires_grad_(true);
    ddp.refresh();
    zero(net, ddp);
    square_loss(net, world.rank()).backward();
    expect_equal(gradients(net), average_gradients(3, make_mlp, square_loss_of_mlp));
  });
}

// Nothing that was trainable when Ddp was attached gets a gradient.
TEST_P(Attached, OnlyUnfrozenParametersAreReached) {
  spawn(2, [](World& world) {
    Mlp net;
    net.first->weight.requires_grad_(false);
    Ddp ddp(net, world.group());
    for (const auto& p : net.parameters()) p.requires_grad_(false);
    net.first->weight.requires_grad_(true);
    zero(net, ddp);
    EXPECT_THAT(refusal(net, world.rank()), HasSubstr("'first.weight' was unfrozen"));
  });
}

// The last loss keeps its graph, and that the node for the old sizes.
TEST_P(Attached, AParameterThatHasGrownWhileALossIsKept) {
  spawn(2, [](World& world) {
    const auto grow = [](Mlp& net) {
      for (auto parameter : {net.third->weight, net.third->bias})
        parameter.set_data(torch::cat({parameter.detach(), parameter.detach()}));
    };
    Mlp net;
    Ddp ddp(net, world.group());
    at::Tensor loss = square_loss(net, world.rank());
    loss.backward();
    grow(net);
    zero(net, ddp);
    ddp.refresh();
    const auto make = [&] {
      auto m = make_mlp();
      grow(*m);
      return m;
    };
    for (int times = 0; times < 2; ++times) {
      zero(net, ddp);
      loss = square_loss(net, world.rank());
      loss.backward();
      expect_equal(gradients(net), average_gradients(2, make, square_loss_of_mlp));
    }
  });
}

TEST_P(Attached, AReplacedLayerOfOneRankIsRefusedOnAll) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    square_loss(net, world.rank()).backward();
    const auto replace = [&] { net.third = net.replace_module("third", torch::nn::Linear(8, 3)); };
    if (world.rank() == 1) replace();
    zero(net, ddp);
    EXPECT_THAT(refusal(net, world.rank()),
                HasSubstr("rank 1: parameter 'third.weight' was replaced by another tensor"));
    torch::manual_seed(5);
    replace();
    ddp.refresh();
    const auto make = [] {
      auto m = make_mlp();
      torch::manual_seed(5);
      m->third = m->replace_module("third", torch::nn::Linear(8, 3));
      return m;
    };
    for (int times = 0; times < 2; ++times) {
      zero(net, ddp);
      square_loss(net, world.rank()).backward();
      expect_equal(gradients(net), average_gradients(2, make, square_loss_of_mlp));
    }
  });
}

TEST_P(Attached, AnAddedParameterIsRefused) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    net.second->register_parameter("scale", torch::ones({1}));
    zero(net, ddp);
    EXPECT_THAT(refusal(net, world.rank()), HasSubstr("parameter 'second.scale' was added"));
  });
}

TEST_P(Attached, AParameterFrozenLaterIsLeftAlone) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    square_loss(net, world.rank()).backward();
    net.second->weight.requires_grad_(false);
    zero(net, ddp);
    square_loss(net, world.rank()).backward();
    const auto make = [] {
      auto m = make_mlp();
      m->second->weight.requires_grad_(false);
      return m;
    };
    expect_equal(gradients(net), average_gradients(2, make, square_loss_of_mlp));
  });
}

// What splits points: new tensors under the same names, so that no backward() begins a pass.
struct Points : torch::nn::Module {
  explicit Points(int64_t count) { set(count); }
  void set(int64_t count) {
    parameters_.clear();
    places = register_parameter("places", torch::ones({count, 3}));
  }
  at::Tensor loss(int rank) const { return (places * (rank + 1.0)).square().mean(); }
  at::Tensor places;
};

TEST(AttachedTo, ReplacementOfAllParametersIsRefusedByTheNextZeroGrad) {
  for (const bool on_one : {false, true}) {
    spawn(2, [&](World& world) {
      Points points(20);
      Ddp ddp(points, world.group());
      const auto step = [&] {
        ddp.zero_grad();
        points.loss(world.rank()).backward();
      };
      const std::string said =
          "rank 1: parameter 'places' was replaced by another tensor after Ddp was attached: call "
          "ddp.refresh()";
      step();
      if (!on_one || world.rank() == 1) points.set(24);
      if (on_one && world.rank() == 0) {
        ddp.zero_grad();
        EXPECT_THAT(message_of<ConfigError>([&] { points.loss(0).backward(); }), HasSubstr(said));
        points.set(24);
      } else {
        step();
        const auto text = message_of<ConfigError>([&] { step(); });
        EXPECT_THAT(text, HasSubstr(on_one ? said : "rank 0" + said.substr(6)));
      }
      ddp.refresh();
      step();
      step();
      const auto make = [] { return std::make_shared<Points>(24); };
      expect_equal(gradients(points), average_gradients(2, make, [](const Points& of, int rank) {
                     return of.loss(rank);
                   }));
    });
  }
}

TEST(AttachedTo, ReplacementOfAllParametersIsRefusedAtTheEndOfTheLanes) {
  spawn(2, [](World& world) {
    Points points(20);
    Ddp ddp(points, world.group(), {.lanes = 4});
    const auto step = [&](int64_t number) {
      for (Lane lane : ddp.lanes(StepKey{.seed = 1, .step = number}))
        points.loss(static_cast<int>(lane.index)).backward();
    };
    step(0);
    points.set(24);
    EXPECT_THAT(message_of<ConfigError>([&] { step(1); }),
                HasSubstr("rank 0: parameter 'places' was replaced by another tensor"));
  });
}

TEST(AttachedTo, AfterAThrownBackwardZeroGradMayComeBeforeRefresh) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    torch::manual_seed(5);
    net.third = net.replace_module("third", torch::nn::Linear(8, 3));
    ddp.zero_grad();
    EXPECT_THAT(refusal(net, world.rank()), HasSubstr("was replaced by another tensor"));
    ddp.zero_grad();
    ddp.zero_grad();
    ddp.refresh();
    square_loss(net, world.rank()).backward();
    EXPECT_EQ(ddp.log().pass_count, 1);
  });
}

TEST(AttachedTo, ZeroGradClearsWhatIsNotAveragedToo) {
  for (const int ranks : {1, 2}) {
    spawn(ranks, [](World& world) {
      Mlp net;
      Ddp ddp(net, world.group(), {.ignore = {"first.weight"}});
      square_loss(net, world.rank()).backward();
      ddp.zero_grad();
      for (const auto& p : net.parameters()) EXPECT_FALSE(p.grad().defined());
    });
  }
}

TEST(AttachedTo, RefreshThatIsRefusedLeavesDdpAttached) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    if (world.rank() == 1) net.register_parameter("more", torch::ones({1}));
    EXPECT_THROW(ddp.refresh(), ConfigError);
    EXPECT_THAT(refusal(net, world.rank()), HasSubstr("rank 1: parameter 'more' was added"));
  });
}

// It accumulates nothing, so it must not meet the other ranks.
TEST(AttachedTo, AutogradGradOfOneRankDoesNotCommunicate) {
  spawn(2, [](World& world) {
    Mlp net;
    net.first->weight.requires_grad_(false);
    Ddp ddp(net, world.group());
    if (world.rank() == 0) {
      const auto weight = net.second->weight;
      const auto loss = square_loss(net, 0);
      EXPECT_TRUE(torch::autograd::grad({loss}, {weight})[0].defined());
    }
    square_loss(net, world.rank()).backward();
    EXPECT_EQ(ddp.log().pass_count, 1);
  });
}

TEST(AttachedTo, ParametersOfTwoDdpsAreRefusedByNameOnAllRanks) {
  spawn(2, [](World& world) {
    Mlp net, other;
    Ddp ddp(net, world.group());
    if (world.rank() == 1) other.second = other.replace_module("second", net.second);
    const auto message = message_of<ConfigError>([&] { Ddp second(other, world.group()); });
    EXPECT_THAT(message, HasSubstr("rank 1: parameter 'second.weight' belongs to another Ddp"));
    EXPECT_THAT(message_of<ConfigError>([&] { Ddp second(net, world.group()); }),
                HasSubstr("'first.weight' belongs to another Ddp"));
    square_loss(net, world.rank()).backward();
    expect_equal(gradients(net), average_gradients(2, make_mlp, square_loss_of_mlp));
  });
}

TEST(AttachedTo, AGradientOfAnotherDtypeOnOneRankIsRefusedOnAll) {
  for (const bool is_reached : {true, false}) {
    spawn(2, [&](World& world) {
      Mlp net;
      Ddp ddp(net, world.group());
      if (world.rank() == 1) net.third->bias.mutable_grad() = at::ones({3}, at::kDouble);
      const auto loss = [&](Mlp& m, int r) {
        return is_reached ? square_loss(m, r) : m.first(input(r)).square().mean();
      };
      EXPECT_THAT(
          message_of<ConfigError>([&] { loss(net, world.rank()).backward(); }),
          HasSubstr("rank 1: the gradient of parameter 'third.bias' was replaced by a float64"));
      ddp.zero_grad();
      square_loss(net, world.rank()).backward();
      expect_equal(gradients(net), average_gradients(2, make_mlp, square_loss_of_mlp));
    });
  }
}

// backward() would walk through all that is left on a parameter.
TEST(AttachedTo, ParametersKeepNoHooksOfBefore) {
  spawn(2, [](World& world) {
    const auto make = [] {
      auto net = make_mlp();
      net->first->weight.register_hook([](const at::Tensor& gradient) { return 2 * gradient; });
      return net;
    };
    const auto net = make();
    const at::Tensor weight = net->first->weight;
    const auto hooks = [&] {
      return torch::autograd::impl::get_autograd_meta(weight)->cpp_hooks_list_->size();
    };
    { const Ddp before(net, world.group()); }
    Ddp ddp(net, world.group());
    EXPECT_EQ(hooks(), 2);
    weight.register_hook([](const at::Tensor& gradient) { return 3 * gradient; });
    for (int times = 0; times < 50; ++times) ddp.refresh();
    EXPECT_EQ(hooks(), 3);
    ddp.zero_grad();
    square_loss(*net, world.rank()).backward();
    auto want = average_gradients(2, make, square_loss_of_mlp);
    want[0] *= 3;
    EXPECT_TRUE(at::allclose(weight.grad(), want[0]));
    // Another one takes the place, in a graph that the first has left, too.
    { const Ddp gone(std::move(ddp)); }
    Ddp next(net, world.group());
    EXPECT_EQ(hooks(), 3);
    next.zero_grad();
    square_loss(*net, world.rank()).backward();
    EXPECT_TRUE(at::allclose(weight.grad(), want[0]));
  });
}

TEST(AttachedTo, TheModuleMayBeDestroyedFirst) {
  spawn(2, [](World& world) {
    auto net = make_mlp();
    Ddp ddp(net, world.group());
    const auto parameters = net->parameters();
    const auto loss = square_loss(*net, world.rank());
    net.reset();
    loss.backward();
    EXPECT_TRUE(
        at::equal(parameters[0].grad(), average_gradients(2, make_mlp, square_loss_of_mlp)[0]));
    ddp.zero_grad();
    EXPECT_FALSE(parameters[0].grad().defined());
  });
}

}  // namespace
}  // namespace lockstep::test
