// GradScaler takes Python's steps, on all ranks the same ones.
#include "lockstep/parallel/grad_scaler.h"

#include <limits>

#include "lockstep/parallel/autocast.h"
#include "parallel/python.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Steps 3, 4 and 9 have gradients that are not finite.
double factor_of(int step) { return step == 3 || step == 9 ? kInfinity : step == 4 ? NAN : 1.0; }

const GradScalerOptions kShort{.init_scale = 1024, .growth_interval = 3};

TEST(GradScaler, ScalesStepsAndSkipsAreThoseOfPythonBitForBit) {
  const auto python = python_numbers("grad_scaler");
  isolated([&] {
    const auto weight = torch::full({2}, 0.5).requires_grad_(true);
    torch::optim::SGD sgd({weight}, 0.1);
    GradScaler scaler({}, kShort);
    for (int step = 0; step < 16; ++step) {
      sgd.zero_grad();
      scaler.scale((weight * weight).sum() * factor_of(step)).backward();
      if (step % 2 == 1) scaler.unscale_(sgd);
      scaler.step(sgd);
      scaler.update();
      EXPECT_EQ(scaler.factor(), python.at(3 * step)) << "step " << step;
      EXPECT_EQ(static_cast<double>(scaler.state().growth_tracker), python.at(3 * step + 1));
      EXPECT_EQ(weight[0].item<double>(), python.at(3 * step + 2)) << "step " << step;
    }
    EXPECT_EQ(GradScaler().factor(), python.at(48));
  });
}

// No Ddp: each rank's gradients are its own, and only rank 1's overflow.
TEST(GradScaler, AnOverflowOnOneRankIsOneOnAll) {
  spawn(3, [](World& world) {
    const auto weight = torch::ones({2}).requires_grad_(true);
    torch::optim::SGD sgd({weight}, 0.1);
    GradScaler scaler(world.group(), kShort);
    for (int step = 0; step < 3; ++step) {
      sgd.zero_grad();
      const bool overflow = step == 1 && world.rank() == 1;
      scaler.scale(weight.sum() * (overflow ? kInfinity : 1.0)).backward();
      EXPECT_EQ(scaler.step(sgd), step != 1);
      scaler.update();
      EXPECT_EQ(scaler.factor(), step == 0 ? 1024 : 512);
    }
    EXPECT_NEAR(weight[0].item<double>(), 0.8, 1e-6);
  });
}

// A loss so small that its float16 gradients are zero without the scale.
at::Tensor tiny_half_loss(Mlp& net, int rank, int step) {
  const Autocast autocast(at::kCPU, at::kHalf);
  return net.forward(input(rank, step)).to(at::kFloat).square().mean() * 1e-7;
}

TEST(GradScaler, B66_UnderDdpInFloat16AllRanksTakeTheSameSteps) {
  spawn(2, [](World& world) {
    Mlp net, unscaled;
    tiny_half_loss(unscaled, 0, 0).backward();
    EXPECT_EQ(unscaled.first->weight.grad().count_nonzero().item<int64_t>(), 0);

    Ddp ddp(net, world.group());
    torch::optim::SGD sgd(net.parameters(), 1e5);
    GradScaler scaler(world.group(), {.init_scale = 65536, .growth_interval = 4});
    std::vector<double> factors;
    for (int step = 0; step < 10; ++step) {
      ddp.zero_grad();
      const double spike = step == 5 && world.rank() == 1 ? kInfinity : 1.0;
      scaler.scale(tiny_half_loss(net, world.rank(), step) * spike).backward();
      if (step == 0) {
        EXPECT_GT(net.first->weight.grad().count_nonzero().item<int64_t>(), 0);
      }
      EXPECT_EQ(scaler.step(sgd), step != 5) << "step " << step;
      scaler.update();
      factors.push_back(scaler.factor() / 65536);
    }
    EXPECT_THAT(factors, ::testing::ElementsAre(1, 1, 1, 2, 2, 1, 1, 1, 1, 2));
    for (const auto& parameter : net.parameters()) {
      auto first = parameter.detach().clone();
      world.group().broadcast(first).wait();
      EXPECT_TRUE(at::equal(first, parameter));
    }
  });
}

TEST(GradScaler, ARestoredOneGoesOnAsTheUninterrupted) {
  isolated([] {
    const auto run = [](GradScaler& scaler, int steps) {
      const auto weight = torch::ones({2}).requires_grad_(true);
      torch::optim::SGD sgd({weight}, 0.1);
      for (int step = 0; step < steps; ++step) {
        sgd.zero_grad();
        scaler.scale(weight.sum()).backward();
        scaler.step(sgd);
        scaler.update();
      }
    };
    GradScaler straight({}, kShort), first({}, kShort), second({}, kShort);
    run(straight, 8);
    run(first, 5);
    second.restore(first.state());
    EXPECT_EQ(second.factor(), first.factor());
    run(second, 3);
    EXPECT_EQ(second.factor(), straight.factor());
    EXPECT_EQ(second.state().growth_tracker, straight.state().growth_tracker);
    EXPECT_THROW(second.restore({.scale = 0}), ConfigError);
  });
}

TEST(GradScaler, DisabledItPassesThrough) {
  isolated([] {
    const auto weight = torch::ones({2}).requires_grad_(true);
    torch::optim::SGD sgd({weight}, 0.5);
    GradScaler scaler({}, {.enabled = false});
    scaler.scale(weight.sum()).backward();
    scaler.unscale_(sgd);
    EXPECT_TRUE(scaler.step(sgd));
    scaler.update();
    EXPECT_EQ(scaler.factor(), 1);
    EXPECT_EQ(weight[0].item<double>(), 0.5);
  });
}

TEST(GradScaler, CallsOutOfOrderAreRefused) {
  isolated([] {
    const auto weight = torch::ones({2}).requires_grad_(true);
    torch::optim::SGD sgd({weight}, 0.5);
    GradScaler scaler;
    EXPECT_THROW(scaler.step(sgd), ConfigError);
    EXPECT_THROW(scaler.update(), ConfigError);
    scaler.scale(weight.sum()).backward();
    scaler.unscale_(sgd);
    EXPECT_THROW(scaler.unscale_(sgd), ConfigError);
    scaler.step(sgd);
    EXPECT_THROW(scaler.step(sgd), ConfigError);
    EXPECT_THROW(scaler.unscale_(sgd), ConfigError);
    scaler.update();
    EXPECT_THROW(GradScaler({}, {.backoff_factor = 1}), ConfigError);
  });
}

// A rank of several may have had no loss (within a Join); all of them not.
TEST(GradScaler, WithoutAnyScaledLossAllRanksRefuseAndChangeNothing) {
  spawn(2, [](World& world) {
    const auto weight = torch::ones({2}).requires_grad_(true);
    torch::optim::SGD sgd({weight}, 0.5);
    GradScaler scaler(world.group(), {.init_scale = 3});
    weight.sum().backward();
    EXPECT_THROW(scaler.step(sgd), ConfigError);
    EXPECT_TRUE(at::equal(weight, at::ones({2})));
    EXPECT_TRUE(at::equal(weight.grad(), at::ones({2})));
    // Now rank 1 alone has one.
    sgd.zero_grad();
    if (world.rank() == 1) {
      scaler.scale(weight.sum()).backward();
    } else {
      weight.mutable_grad() = at::full({2}, 3.0F);
    }
    EXPECT_TRUE(scaler.step(sgd));
    scaler.update();
    EXPECT_TRUE(at::allclose(weight, at::full({2}, 0.5)));
    EXPECT_EQ(scaler.factor(), 3);
  });
}

TEST(GradScaler, LbfgsIsRefused) {
  isolated([] {
    const auto weight = torch::ones({2}).requires_grad_(true);
    torch::optim::LBFGS lbfgs({weight}, 0.5);
    GradScaler scaler;
    scaler.scale(weight.sum()).backward();
    EXPECT_THROW(scaler.step(lbfgs), ConfigError);
  });
}

TEST(GradScaler, ComplexGradientsAreUnscaledToo) {
  isolated([] {
    const auto parameter = torch::ones({2}, at::kComplexFloat).requires_grad_(true);
    torch::optim::SGD sgd({parameter}, 1.0);
    GradScaler scaler;
    scaler.scale(at::view_as_real(parameter).sum()).backward();
    EXPECT_TRUE(scaler.step(sgd));
    scaler.update();
    EXPECT_TRUE(at::equal(at::view_as_real(parameter.detach()),
                          torch::tensor({{0.0F, -1.0F}, {0.0F, -1.0F}})));
    sgd.zero_grad();
    scaler.scale(at::view_as_real(parameter).sum() * INFINITY).backward();
    EXPECT_FALSE(scaler.step(sgd));
  });
}

TEST(GradScaler, Float16GradientsAreRefused) {
  isolated([] {
    const auto weight = torch::ones({2}, at::kHalf).requires_grad_(true);
    torch::optim::SGD sgd({weight}, 0.5);
    GradScaler scaler;
    scaler.scale(weight.sum()).backward();
    EXPECT_THROW(scaler.step(sgd), ConfigError);
  });
}

}  // namespace
}  // namespace lockstep::test
