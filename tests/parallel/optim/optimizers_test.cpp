// GradScaler, clipping and a scheduler around any optimizer, divided or not, take the steps of one
// process on the whole batch.
#include <limits>
#include <sstream>

#include "lockstep/parallel/clip.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/fused_sgd.h"
#include "lockstep/parallel/grad_scaler.h"
#include "lockstep/parallel/lr_scheduler.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using torch::optim::Optimizer;
using OptimizerKinds = std::vector<std::pair<std::string, ZeroOptimizer::Make>>;

const OptimizerKinds& optimizer_kinds() {
  using namespace torch::optim;
  static const OptimizerKinds all{
      {"SGD", zero<SGD>(SGDOptions(0.1).momentum(0.9))},
      {"Adam", zero<Adam>(AdamOptions(0.01).amsgrad(true))},
      {"AdamW", zero<AdamW>(AdamWOptions(0.01))},
      {"RMSprop", zero<RMSprop>(RMSpropOptions(0.01).momentum(0.5))},
      {"Adagrad", zero<Adagrad>(AdagradOptions(0.01))},
      {"FusedAdam", zero<FusedAdam>(AdamOptions(0.01).weight_decay(0.1))},
      {"FusedAdamW", zero<FusedAdamW>(AdamWOptions(0.01))},
      {"FusedSGD", zero<FusedSGD>(SGDOptions(0.1).momentum(0.9))},
  };
  return all;
}

constexpr int kStepsTaken = 6;
// Its loss is infinite, on one rank.
constexpr int kOverflowAt = 2;

at::Tensor rows_for(int rank, int ranks, int step) {
  std::vector<at::Tensor> parts;
  for (int r = 0; r < ranks; ++r) {
    if (rank < 0 || rank == r) parts.push_back(input(r, step));
  }
  return at::cat(parts);
}

struct Trained {
  Mlp net;
  std::vector<double> norms, rates;
};

// `rank` below 0: one process with all ranks' rows.
void train_scaled(Trained& run, Optimizer& optimizer, const Group& group, int rank, int ranks) {
  GradScaler scaler(group, {.init_scale = 1024, .growth_interval = 2});
  LrScheduler schedule(optimizer, step_lr({.size = 2, .gamma = 0.5}));
  const auto type = run.net.first->weight.scalar_type();
  for (int step = 0; step < kStepsTaken; ++step) {
    optimizer.zero_grad();
    const bool spike = step == kOverflowAt && (rank < 0 || rank == ranks - 1);
    const at::Tensor loss = run.net.forward(rows_for(rank, ranks, step).to(type)).square().mean();
    scaler.scale(spike ? loss * std::numeric_limits<double>::infinity() : loss).backward();
    scaler.unscale_(optimizer);
    const at::Tensor norm = clip_grad_norm_(run.net.parameters(), 0.3);
    EXPECT_EQ(scaler.step(optimizer), step != kOverflowAt);
    scaler.update();
    schedule.step();
    run.norms.push_back(norm.item<double>());
    run.rates.push_back(schedule.lr());
  }
  EXPECT_EQ(scaler.factor(), 2048);
}

class OptimizerWorlds : public ::testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(On, OptimizerWorlds,
                         ::testing::Values(Ranks{"auto", 1}, Ranks{"shm", 2}, Ranks{"shm", 3},
                                           Ranks{"gloo", 2}),
                         name_of);

TEST_P(OptimizerWorlds, ScaledClippedAndScheduledItTakesTheStepsOfOneProcess) {
  spawn(GetParam(), [](World& world) {
    for (const auto& [name, make] : optimizer_kinds()) {
      for (const auto dtype : {at::kFloat, at::kDouble}) {
        SCOPED_TRACE(::testing::Message() << name << " in " << c10::toString(dtype));
        Trained whole, divided, one;
        for (auto* run : {&whole, &divided, &one}) run->net.to(dtype);
        Ddp first(whole.net, world.group()), second(divided.net, world.group());
        const auto usual = make({whole.net.parameters()}), single = make({one.net.parameters()});
        ZeroOptimizer parts(divided.net.parameters(), world.group(), make);
        train_scaled(whole, *usual, world.group(), world.rank(), world.size());
        train_scaled(divided, parts, world.group(), world.rank(), world.size());
        expect_equal(divided.net.parameters(), whole.net.parameters());
        EXPECT_EQ(divided.rates, whole.rates);
        // In float64 a mean of means differs from the mean by less than an optimizer can blow up.
        if (dtype != at::kDouble) continue;
        train_scaled(one, *single, Group(), -1, world.size());
        EXPECT_EQ(divided.rates, one.rates);
        for (size_t i = 0; i < one.net.parameters().size(); ++i) {
          const at::Tensor got = divided.net.parameters()[i], want = one.net.parameters()[i];
          EXPECT_TRUE(at::allclose(got, want, 1e-8, 1e-10)) << (got - want).abs().max();
        }
        for (int step = 0; step < kStepsTaken; ++step) {
          if (step == kOverflowAt) continue;
          EXPECT_NEAR(divided.norms[step], one.norms[step], 1e-9 * one.norms[step]);
        }
      }
    }
  });
}

TEST_P(OptimizerWorlds, MicroBatchesUnderHoldAreScaledAndClippedOnce) {
  spawn(GetParam(), [](World& world) {
    const auto make = zero<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01));
    Mlp net, one;
    net.to(at::kDouble);
    one.to(at::kDouble);
    Ddp ddp(net, world.group());
    ZeroOptimizer parts(net.parameters(), world.group(), make);
    const auto whole = make({one.parameters()});
    GradScaler scaler(world.group(), {.init_scale = 64, .growth_interval = 1});
    GradScaler single({}, {.init_scale = 64, .growth_interval = 1});
    const auto loss_of = [](Mlp& of, const at::Tensor& x) {
      return of.forward(x.to(at::kDouble)).square().mean() / 2;
    };
    for (int step = 0; step < 4; ++step) {
      ddp.zero_grad();
      {
        const auto hold = ddp.hold();
        scaler.scale(loss_of(net, rows_for(world.rank(), world.size(), 2 * step))).backward();
      }
      scaler.scale(loss_of(net, rows_for(world.rank(), world.size(), 2 * step + 1))).backward();
      scaler.unscale_(parts);
      const double norm = clip_grad_norm_(net.parameters(), 0.1).item<double>();
      scaler.step(parts);
      scaler.update();

      whole->zero_grad();
      for (int half = 0; half < 2; ++half) {
        single.scale(loss_of(one, rows_for(-1, world.size(), 2 * step + half))).backward();
      }
      single.unscale_(*whole);
      EXPECT_NEAR(norm, clip_grad_norm_(one.parameters(), 0.1).item<double>(), 1e-9 * norm);
      single.step(*whole);
      single.update();
    }
    EXPECT_EQ(scaler.factor(), single.factor());
    for (size_t i = 0; i < one.parameters().size(); ++i) {
      EXPECT_TRUE(at::allclose(net.parameters()[i], one.parameters()[i], 1e-8, 1e-10));
    }
  });
}

TEST(ZeroAsAnOptimizer, SchedulersAndClosuresOfTorchTakeIt) {
  spawn(2, [](World& world) {
    Mlp net, usual;
    Ddp first(net, world.group()), second(usual, world.group());
    const auto make = zero<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9));
    ZeroOptimizer divided(net.parameters(), world.group(), make);
    const auto whole = make({usual.parameters()});
    torch::optim::StepLR slower(divided, 2, 0.5), usual_slower(*whole, 2, 0.5);
    for (int step = 0; step < 4; ++step) {
      const auto closure_of = [&](Mlp& of, Optimizer& optimizer) {
        return [&, step] {
          optimizer.zero_grad();
          const at::Tensor loss = square_loss(of, world.rank(), step);
          loss.backward();
          return loss;
        };
      };
      const at::Tensor loss = divided.step(closure_of(net, divided));
      EXPECT_TRUE(at::equal(loss, whole->step(closure_of(usual, *whole))));
      slower.step();
      usual_slower.step();
    }
    EXPECT_LT(divided.param_groups()[0].options().get_lr(), 0.1);
    EXPECT_EQ(divided.param_groups()[0].options().get_lr(),
              whole->param_groups()[0].options().get_lr());
    expect_equal(net.parameters(), usual.parameters());
  });
}

TEST(ZeroAsAnOptimizer, AGroupThatGrewIsRefusedAndATwiceListedParameterIsSteppedOnce) {
  spawn(2, [](World& world) {
    const auto weight = torch::ones({3}).requires_grad_(),
               other = torch::ones({2}).requires_grad_();
    const auto make = zero<torch::optim::SGD>(torch::optim::SGDOptions(0.5));
    ZeroOptimizer twice({weight, weight}, world.group(), make);
    weight.sum().backward();
    twice.step();
    EXPECT_TRUE(at::equal(weight, at::full({3}, 0.5)));
    twice.add_param_group(torch::optim::OptimizerParamGroup({other}));
    EXPECT_THROW(twice.step(), ConfigError);
    EXPECT_TRUE(at::equal(weight, at::full({3}, 0.5)));
    std::vector<torch::optim::OptimizerParamGroup> overlapping{
        torch::optim::OptimizerParamGroup({weight}), torch::optim::OptimizerParamGroup({weight})};
    EXPECT_THROW(ZeroOptimizer(overlapping, world.group(), make), ConfigError);
  });
}

TEST(ZeroAsAnOptimizer, ASavedOneKeepsTheRatesThatASchedulerSet) {
  spawn(2, [](World& world) {
    Mlp net;
    const auto make = zero<FusedAdam>(torch::optim::AdamOptions(0.1));
    ZeroOptimizer saved(net.parameters(), world.group(), make);
    saved.param_groups()[0].options().set_lr(0.03);
    std::stringstream stream;
    torch::save(static_cast<Optimizer&>(saved), stream);
    ZeroOptimizer loaded(net.parameters(), world.group(), make);
    torch::load(static_cast<Optimizer&>(loaded), stream);
    EXPECT_EQ(loaded.param_groups()[0].options().get_lr(), 0.03);
  });
}

}  // namespace
}  // namespace lockstep::test
