// Whatever happens to a gradient between two backwards, the next average is right.
#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

at::Tensor own_loss(Mlp& net, int rank) { return square_loss(net, rank); }

std::vector<at::Tensor> averages(int ranks) { return average_gradients(ranks, make_mlp, own_loss); }

void step(Mlp& net, World& world) { own_loss(net, world.rank()).backward(); }

TEST(DdpGradients, OptimizerZeroGradSetsToNone) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    torch::optim::SGD sgd(net.parameters(), 0.0);
    for (int i = 0; i < 3; ++i) {
      sgd.zero_grad();
      step(net, world);
    }
    expect_equal(gradients(net), averages(2));
  });
}

TEST(DdpGradients, OptimizerZeroGradFillsWithZeros) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    torch::optim::SGD sgd(net.parameters(), 0.0);
    for (int i = 0; i < 3; ++i) {
      sgd.zero_grad(/*set_to_none=*/false);
      step(net, world);
    }
    expect_equal(gradients(net), averages(2));
  });
}

TEST(DdpGradients, AGraphThatSavedOneNoticesThatTheNextBackwardOverwritesIt) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    torch::optim::SGD sgd(net.parameters(), 0.0);
    step(net, world);
    const at::Tensor weight = at::ones({8, 6}, at::kFloat).requires_grad_(true);
    const at::Tensor sum = (weight * net.first->weight.grad()).sum();
    sgd.zero_grad();
    step(net, world);
    EXPECT_THAT(message_of([&] { sum.backward(); }),
                testing::HasSubstr("modified by an inplace operation"));
  });
}

TEST(DdpGradients, B03_GradientsOfOneBucketLieInOneAlignedTensor) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    step(net, world);
    for (const auto& gradient : gradients(net)) {
      EXPECT_TRUE(gradient.storage().is_alias_of(gradients(net)[0].storage()));
      EXPECT_EQ(reinterpret_cast<uintptr_t>(gradient.const_data_ptr()) % 64, 0U);
    }
  });
}

TEST(DdpGradients, AReplacedGradientIsCopiedIn) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    step(net, world);
    const auto before = gradients(net)[0].clone();
    net.parameters()[0].mutable_grad() = at::full({8, 6}, 1.0 * world.rank());
    step(net, world);
    EXPECT_TRUE(at::allclose(gradients(net)[0], before + 0.5, 1e-5, 1e-7));
    EXPECT_TRUE(gradients(net)[0].storage().is_alias_of(gradients(net)[1].storage()));
  });
}

// The place of the one is where the other lies.
TEST(DdpGradients, SwappedGradientsAreAddedToAsInOneProcess) {
  for (const bool accumulate : {false, true}) {
    spawn(2, [&](World& world) {
      const auto parameters = [] {
        const at::Tensor both = torch::ones({2, 100}, at::kDouble);
        std::vector<at::Tensor> all;
        for (const int64_t i : {0, 1}) all.push_back(both[i].clone().requires_grad_());
        return all;
      };
      const auto usual = parameters(), all = parameters();
      torch::nn::Module net;
      net.register_parameter("a", all[0]);
      net.register_parameter("b", all[1]);
      Ddp ddp(net, world.group());
      for (int step = 1; step < 4; ++step) {
        for (const auto& each : {usual, all}) {
          for (const at::Tensor& parameter : each) {
            if (!accumulate && parameter.grad().defined()) parameter.mutable_grad().zero_();
          }
          const auto loss = [&] { return (each[0].sum() + each[1].sum() * 10.0) * step; };
          if (accumulate) {
            auto hold = ddp.hold();
            loss().backward();
          }
          loss().backward();
        }
        expect_equal({all[0].grad(), all[1].grad()}, {usual[0].grad(), usual[1].grad()});
        for (const auto& each : {usual, all})
          std::swap(each[0].mutable_grad(), each[1].mutable_grad());
      }
    });
  }
}

// The next backward() writes to its old place while it is another parameter's.
TEST(DdpGradients, AGradientGivenToAnotherParameterUnderHold) {
  spawn(2, [](World& world) {
    torch::nn::Module net;
    const at::Tensor a = net.register_parameter("a", torch::ones({100}));
    const at::Tensor b = net.register_parameter("b", torch::ones({100}));
    Ddp ddp(net, world.group());
    (a * 3 + b).sum().backward();
    b.mutable_grad() = a.grad();
    a.mutable_grad().reset();
    {
      auto hold = ddp.hold();
      (a * 5).sum().backward();
    }
    b.sum().backward();
    expect_equal({a.grad(), b.grad()}, {at::full({100}, 5.0), at::full({100}, 4.0)});
  });
}

// As programs do that combine the gradients of several tasks.
TEST(DdpGradients, ThoseThatAreKeptKeepTheirValues) {
  for (const bool accumulate : {false, true}) {
    spawn(2, [&](World& world) {
      torch::nn::Module net;
      const at::Tensor a = net.register_parameter("a", torch::ones({100}));
      const at::Tensor b = net.register_parameter("b", torch::ones({7}));
      Ddp ddp(net, world.group());
      std::vector<at::Tensor> kept;
      for (int task = 1; task < 5; ++task) {
        ddp.zero_grad();
        if (accumulate) {
          auto hold = ddp.hold();
          (a.sum() + b.sum()).backward();
        }
        (a.sum() * task * (world.rank() + 1) + b.sum()).backward();
        kept.push_back(a.grad());
        // Not cleared: the next backward() adds to it, as in one process.
        if (task == 4) (a.sum() * 100).backward();
      }
      const double first = accumulate ? 1 : 0;
      for (int task = 1; task < 5; ++task) {
        expect_equal({kept[task - 1]},
                     {at::full({100}, first + 1.5 * task + (task == 4 ? 100 : 0))});
      }
    });
  }
}

// Also where several backward() come under one hold().
TEST(DdpGradients, ThoseThatAreKeptOrGivenAwayWithinOneHold) {
  spawn(2, [](World& world) {
    torch::nn::Module net;
    const at::Tensor a = net.register_parameter("a", torch::ones({100}));
    const at::Tensor b = net.register_parameter("b", torch::ones({100}));
    Ddp ddp(net, world.group());
    at::Tensor kept;
    {
      auto hold = ddp.hold();
      (a * 2).sum().backward();
      kept = a.grad();
      ddp.zero_grad();
      (a * 3).sum().backward();
      b.mutable_grad() = a.grad();
      a.mutable_grad().reset();
      (a * 5).sum().backward();
    }
    b.sum().backward();
    expect_equal({kept, a.grad(), b.grad()},
                 {at::full({100}, 2.0), at::full({100}, 5.0), at::full({100}, 4.0)});
  });
}

// It has the memory of what it is the conjugate of.
TEST(DdpGradients, AConjugateInTheirPlaceIsCopiedIn) {
  spawn(2, [](World& world) {
    const auto train = [](torch::nn::Module& net, int rank) {
      const at::Tensor c = net.parameters()[0];
      const auto loss = [&](double re, double im) {
        const at::Tensor by = at::complex(at::full({10}, re), at::full({10}, im * (rank + 1)));
        return at::real(c * by).sum();
      };
      loss(1, 2).backward();
      c.mutable_grad() = c.grad().conj();
      loss(3, 4).backward();
      return c.grad();
    };
    const auto make = [] {
      auto net = std::make_shared<torch::nn::Module>();
      net->register_parameter("c", torch::ones({10}, at::kComplexFloat));
      return net;
    };
    const auto one = make(), other = make(), mine = make();
    const at::Tensor want = (train(*one, 0) + train(*other, 1)) / 2;
    Ddp ddp(*mine, world.group());
    expect_equal({train(*mine, world.rank())}, {want.resolve_conj()});
  });
}

TEST(DdpGradients, ThoseOfAnotherModelKeepTheirValues) {
  spawn(2, [](World& world) {
    torch::nn::Module net, other;
    const at::Tensor a = net.register_parameter("a", torch::ones({100}));
    const at::Tensor ignored = net.register_parameter("ignored", torch::ones({100}));
    const at::Tensor b = other.register_parameter("b", torch::ones({100}));
    Ddp ddp(net, world.group(), {.ignore = {"ignored"}}), second(other, world.group());
    for (int step = 1; step < 4; ++step) {
      (a.sum() * step).backward();
      ignored.mutable_grad() = a.grad();
      a.mutable_grad().reset();
      (a.sum() * 10).backward();
      b.mutable_grad() = a.grad();
      a.mutable_grad().reset();
      (a.sum() * 20).backward();
      b.sum().backward();
      expect_equal({ignored.grad(), b.grad(), a.grad()},
                   {at::full({100}, 1.0 * step), at::full({100}, 11.0), at::full({100}, 20.0)});
      a.mutable_grad().reset();
    }
  });
}

TEST(DdpGradients, AGradientFromBeforeDdpCounts) {
  spawn(2, [](World& world) {
    Mlp net;
    net.parameters()[1].mutable_grad() = at::full({8}, 2.0 * world.rank());
    Ddp ddp(net, world.group());
    step(net, world);
    EXPECT_TRUE(at::allclose(gradients(net)[1], averages(2)[1] + 1, 1e-5, 1e-7));
  });
}

TEST(DdpGradients, TensorHooksRunBeforeTheAverage) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    const double factor = world.rank() + 1;
    net.parameters()[5].register_hook([factor](const at::Tensor& g) { return g * factor; });
    step(net, world);
    const auto want = average_gradients(2, make_mlp, [](Mlp& m, int r) {
      const double by = r + 1;
      m.parameters()[5].register_hook([by](const at::Tensor& g) { return g * by; });
      return own_loss(m, r);
    });
    expect_equal(gradients(net), want);
  });
}

struct AddOne : torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor& parameter) override {
    parameter.mutable_grad() = parameter.grad() + 1;
  }
};

TEST(DdpGradients, PostAccumulateHooksRunBeforeTheAverageAndMayReplaceTheGradient) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    if (world.rank() == 1) {
      torch::autograd::impl::set_post_acc_grad_hooks(net.parameters()[2],
                                                     std::make_unique<AddOne>());
    }
    step(net, world);
    EXPECT_TRUE(at::allclose(gradients(net)[2], averages(2)[2] + 0.5, 1e-5, 1e-7));
  });
}

TEST(DdpGradients, B58_CreateGraphGivesTheSameValues) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    ::testing::internal::CaptureStderr();
    for (int i = 0; i < 2; ++i) {
      ddp.zero_grad();
      own_loss(net, world.rank()).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    }
    const std::string said = ::testing::internal::GetCapturedStderr();
    const size_t warning = said.find("averages, which have no history");
    EXPECT_EQ(warning != std::string::npos, world.rank() == 0) << said;
    EXPECT_EQ(said.find("averages, which have no history", warning + 1), std::string::npos);
    expect_equal(gradients(net), averages(2));
    EXPECT_FALSE(gradients(net)[0].requires_grad());
  });
}

// The usual way to a second derivative does not pass through the accumulators.
TEST(DdpGradients, AGradientPenaltyIsAveraged) {
  spawn(2, [](World& world) {
    const auto penalty = [](Mlp& net, int rank) {
      auto x = input(rank).requires_grad_(true);
      const auto slope = torch::autograd::grad({net.forward(x).sum()}, {x}, {}, true, true)[0];
      return slope.square().sum();
    };
    const auto want = average_gradients(2, make_mlp, penalty);
    Mlp net;
    Ddp ddp(net, world.group());
    penalty(net, world.rank()).backward();
    expect_equal(gradients(net), want);
  });
}

TEST(DdpGradients, B34_ForwardWithoutGradArmsNothing) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    if (world.rank() == 0) {
      const at::NoGradGuard no_grad;
      net.forward(input(0));
    }
    step(net, world);
    expect_equal(gradients(net), averages(2));
  });
}

TEST(DdpGradients, AnExceptionInBackwardLeavesDdpUsable) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group(), {.bucket_bytes = {1, 1}});
    const auto handle = net.parameters()[0].register_hook(
        [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("mine"); });
    EXPECT_THROW(step(net, world), std::runtime_error);
    net.parameters()[0].remove_hook(handle);
    ddp.zero_grad();
    step(net, world);
    expect_equal(gradients(net), averages(2));
  });
}

TEST(DdpGradients, AnExceptionUnderHoldLeavesDdpUsable) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    if (world.rank() == 1) {
      const auto hold = ddp.hold();
      const auto handle = net.parameters()[0].register_hook(
          [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("mine"); });
      EXPECT_THROW(step(net, world), std::runtime_error);
      net.parameters()[0].remove_hook(handle);
    }
    ddp.zero_grad();
    step(net, world);
    expect_equal(gradients(net), averages(2));
  });
}

TEST(DdpGradients, TwoBackwardsOfOneGraphAddUp) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    const auto loss = own_loss(net, world.rank());
    loss.backward({}, /*retain_graph=*/true);
    expect_equal(gradients(net), averages(2));
    loss.backward();
    for (size_t i = 0; i < gradients(net).size(); ++i) {
      EXPECT_TRUE(at::allclose(gradients(net)[i], 2 * averages(2)[i], 1e-5, 1e-7));
    }
  });
}

}  // namespace
}  // namespace lockstep::test
