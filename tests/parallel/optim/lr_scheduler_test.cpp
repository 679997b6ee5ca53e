// Learning rates are Python's.
#include "lockstep/parallel/lr_scheduler.h"

#include <limits>

#include "lockstep/parallel/fused_adam.h"
#include "parallel/python.h"
#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using ::testing::HasSubstr;

// Python multiplies a rate step by step where these are closed forms: 40 roundings of float64.
constexpr double kWithin = 1e-12;

template <typename Optimizer, typename Options>
Optimizer two_groups(const Options& defaults) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{torch::zeros({1}).requires_grad_(true)});
  auto second = std::make_unique<Options>(defaults);
  second->lr(0.03);
  groups.emplace_back(std::vector{torch::zeros({1}).requires_grad_(true)}, std::move(second));
  return Optimizer(groups, defaults);
}

torch::optim::SGD two_sgd_groups() {
  return two_groups<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9));
}

// In the order of SCHEDULES in reference.py.
std::vector<Schedule> all_schedules() {
  return {constant_lr({.factor = 0.25, .steps = 7}),
          linear_lr({.start_factor = 0.1, .end_factor = 0.9, .steps = 9}),
          step_lr({.size = 4, .gamma = 0.5}),
          multi_step_lr({3, 8, 8, 20}, 0.3),
          exponential_lr(0.93),
          polynomial_lr({.steps = 12, .power = 1.7}),
          cosine_lr({.steps = 11, .lowest_lr = 0.001}),
          cosine_restarts_lr({.first_steps = 5, .multiplier = 2, .lowest_lr = 0.002}),
          cosine_restarts_lr({.first_steps = 6}),
          sequential_lr({linear_lr({.start_factor = 0.01, .steps = 6}), cosine_lr({.steps = 20}),
                         exponential_lr(0.9)},
                        {6, 26})};
}

TEST(LrScheduler, RatesOfAllSchedulesAreThoseOfPython) {
  const auto python = python_numbers("schedules");
  isolated([&] {
    size_t at = 0;
    for (const auto& schedule : all_schedules()) {
      auto sgd = two_sgd_groups();
      LrScheduler scheduler(sgd, schedule);
      for (int step = 0; step < 40; ++step, scheduler.step()) {
        EXPECT_NEAR(scheduler.lr(0), python.at(at++), kWithin)
            << "schedule " << at / 80 << ", step " << step;
        EXPECT_NEAR(scheduler.lr(1), python.at(at++), kWithin);
      }
    }
    EXPECT_EQ(at, python.size());
  });
}

TEST(LrScheduler, OneCycleMovesRatesAndMomentumAsPython) {
  const auto python = python_numbers("one_cycle");
  isolated([&] {
    size_t at = 0;
    const auto compare = [&](torch::optim::Optimizer& optimizer, const auto& momentum_of,
                             const parallel::OneCycleOptions& options) {
      LrScheduler scheduler(optimizer, one_cycle_lr(options));
      for (int step = 0; step < 30; ++step, scheduler.step()) {
        for (size_t group = 0; group < 2; ++group) {
          EXPECT_NEAR(scheduler.lr(group), python.at(at++), kWithin) << "step " << step;
          EXPECT_NEAR(momentum_of(optimizer.param_groups()[group].options()), python.at(at++),
                      kWithin);
        }
      }
    };
    const auto momentum = [](auto& options) {
      return static_cast<torch::optim::SGDOptions&>(options).momentum();
    };
    const auto beta1 = [](auto& options) {
      return std::get<0>(static_cast<torch::optim::AdamOptions&>(options).betas());
    };
    auto sgd = two_sgd_groups();
    compare(sgd, momentum, {.steps = 30});
    auto again = two_sgd_groups();
    compare(again, momentum,
            {.steps = 30, .rising = 0.25, .anneal = parallel::Anneal::Linear, .three_phase = true});
    auto adam = two_groups<FusedAdam>(torch::optim::AdamOptions(0.1));
    compare(adam, beta1, {.steps = 30, .div_factor = 10, .final_div_factor = 50});
    EXPECT_EQ(at, python.size());
  });
}

double plateau_metric(int step) {
  constexpr double kMetrics[] = {5.0, 4.0, 4.0, 4.1, 3.99999, 3.0, 3.2, 3.3, 3.4, 3.1};
  return kMetrics[step % 10] - (step / 10) * 0.5;
}

// The ranks' metrics differ; their average is Python's, exactly because halves are.
TEST(ReduceLrOnPlateau, RanksAgreeOnPythonsRates) {
  const auto python = python_numbers("plateau");
  spawn(2, [&](World& world) {
    size_t at = 0;
    for (const PlateauOptions& options :
         {PlateauOptions{.factor = 0.5, .patience = 1},
          PlateauOptions{.better = parallel::Better::Higher,
          .patience = 2,
          .threshold = 0.2,
          .threshold_mode = parallel::Threshold::Absolute,
          .cooldown = 2},
          PlateauOptions{.factor = 0.2, .patience = 0, .lowest_lr = 0.004, .eps = 0.001}}) {
      auto sgd = two_sgd_groups();
      ReduceLrOnPlateau scheduler(sgd, world.group(), options);
      for (int step = 0; step < 30; ++step) {
        const double offset = world.rank() == 0 ? -0.25 : 0.25;
        EXPECT_NEAR(scheduler.step(plateau_metric(step) + offset), plateau_metric(step), 1e-15);
        for (auto& group : sgd.param_groups()) {
          EXPECT_NEAR(group.options().get_lr(), python.at(at++), kWithin) << "step " << step;
        }
      }
    }
    EXPECT_EQ(at, python.size());
  });
}

TEST(ReduceLrOnPlateau, ARestoredOneGoesOnAsTheUninterrupted) {
  isolated([] {
    auto straight_sgd = two_sgd_groups(), halved_sgd = two_sgd_groups();
    const PlateauOptions options{.factor = 0.5, .patience = 1, .cooldown = 1};
    ReduceLrOnPlateau straight(straight_sgd, Group(), options), first(halved_sgd, Group(), options);
    for (int step = 0; step < 20; ++step) straight.step(plateau_metric(step));
    for (int step = 0; step < 9; ++step) first.step(plateau_metric(step));
    ReduceLrOnPlateau second(halved_sgd, Group(), options);
    second.restore(first.state());
    for (int step = 9; step < 20; ++step) second.step(plateau_metric(step));
    EXPECT_EQ(halved_sgd.param_groups()[0].options().get_lr(),
              straight_sgd.param_groups()[0].options().get_lr());
    EXPECT_EQ(second.state().best, straight.state().best);
  });
}

TEST(LrScheduler, ARestoredOneGoesOnAsTheUninterrupted) {
  isolated([] {
    for (const auto& schedule : all_schedules()) {
      auto straight_sgd = two_sgd_groups(), sgd = two_sgd_groups(), resumed_sgd = two_sgd_groups();
      LrScheduler straight(straight_sgd, schedule), first(sgd, schedule);
      for (int step = 0; step < 30; ++step) straight.step();
      for (int step = 0; step < 17; ++step) first.step();
      // Its own construction has already moved the rates.
      LrScheduler second(resumed_sgd, schedule);
      second.restore(first.state());
      EXPECT_EQ(second.lr(1), first.lr(1));
      for (int step = 17; step < 30; ++step) second.step();
      EXPECT_EQ(second.lr(0), straight.lr(0));
      EXPECT_EQ(second.lr(1), straight.lr(1));
    }
  });
}

TEST(LrScheduler, AGroupAddedLaterFollowsFromItsOwnRate) {
  isolated([] {
    auto sgd = two_sgd_groups();
    LrScheduler scheduler(sgd, exponential_lr(0.5));
    sgd.add_param_group(
        torch::optim::OptimizerParamGroup(std::vector{torch::zeros({1}).requires_grad_(true)},
                                          std::make_unique<torch::optim::SGDOptions>(8.0)));
    scheduler.step();
    EXPECT_EQ(scheduler.lr(0), 0.05);
    EXPECT_EQ(scheduler.lr(2), 4.0);
  });
}

TEST(LrScheduler, AGroupAddedSinceTheLastStepIsInTheState) {
  isolated([] {
    const auto add = [](auto& sgd) {
      sgd.add_param_group(
          torch::optim::OptimizerParamGroup(std::vector{torch::zeros({1}).requires_grad_(true)},
                                            std::make_unique<torch::optim::SGDOptions>(8.0)));
    };
    auto sgd = two_sgd_groups(), resumed_sgd = two_sgd_groups();
    LrScheduler scheduler(sgd, exponential_lr(0.5));
    scheduler.step();
    add(sgd);
    const auto saved = scheduler.state();
    add(resumed_sgd);
    LrScheduler resumed(resumed_sgd, exponential_lr(0.5));
    resumed.restore(saved);
    scheduler.step();
    resumed.step();
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(resumed.lr(i), scheduler.lr(i)) << i;
  });
}

TEST(LrScheduler, ALostGroupIsRefused) {
  isolated([] {
    auto sgd = two_sgd_groups();
    LrScheduler scheduler(sgd, exponential_lr(0.5));
    sgd.param_groups().erase(sgd.param_groups().begin());
    const double rate = scheduler.lr();
    for (const auto& call :
         {+[](LrScheduler& all) { all.step(); }, +[](LrScheduler& all) { (void)all.state(); }}) {
      EXPECT_THAT(message_of<ConfigError>([&] { call(scheduler); }),
                  HasSubstr("[lr_scheduler] the optimizer has 1 parameter groups, and had 2: "
                            "construct another LrScheduler when one is removed"));
    }
    EXPECT_EQ(scheduler.lr(), rate);
  });
}

TEST(LrScheduler, AnyFunctionIsASchedule) {
  isolated([] {
    auto sgd = two_sgd_groups();
    LrScheduler scheduler(sgd, {.lr = [](double base, int64_t step) { return base + step; }});
    scheduler.step();
    EXPECT_EQ(scheduler.lr(1), 1.03);
  });
}

TEST(LrScheduler, WhatMakesNoScheduleIsRefused) {
  isolated([] {
    EXPECT_THROW(linear_lr({.steps = 0}), ConfigError);
    EXPECT_THROW(multi_step_lr({5, 3}), ConfigError);
    EXPECT_THROW(cosine_restarts_lr({.multiplier = 0}), ConfigError);
    EXPECT_THROW(one_cycle_lr({.steps = 10, .rising = 0.1}), ConfigError);
    EXPECT_THROW(sequential_lr({step_lr({})}, {3}), ConfigError);
    EXPECT_THROW(sequential_lr({one_cycle_lr({.steps = 30})}, {}), ConfigError);
    constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
    EXPECT_THROW(step_lr({.gamma = kNan}), ConfigError);
    EXPECT_THROW(multi_step_lr({3}, kNan), ConfigError);
    EXPECT_THROW(exponential_lr(kNan), ConfigError);
    EXPECT_THROW(cosine_lr({.lowest_lr = kNan}), ConfigError);
    EXPECT_THROW(polynomial_lr({.power = -1}), ConfigError);
    EXPECT_THROW(polynomial_lr({.power = kNan}), ConfigError);
    torch::optim::Adagrad adagrad({torch::zeros({1}).requires_grad_(true)});
    EXPECT_THROW(LrScheduler(adagrad, one_cycle_lr({.steps = 30})), ConfigError);
    auto sgd = two_sgd_groups();
    EXPECT_THROW(ReduceLrOnPlateau(sgd, Group(), {.factor = 1.0}), ConfigError);
    LrScheduler scheduler(sgd, one_cycle_lr({.steps = 30}));
    for (int step = 0; step < 30; ++step) scheduler.step();
    const double rate = scheduler.lr();
    EXPECT_THROW(scheduler.step(), ConfigError);
    EXPECT_THROW(scheduler.restore({.step = 1, .base_lrs = {0.1}}), ConfigError);
    EXPECT_THROW(scheduler.restore({.step = 99, .base_lrs = {0.1, 0.2}}), ConfigError);
    EXPECT_EQ(scheduler.state().step, 30);
    EXPECT_EQ(scheduler.lr(), rate);
    EXPECT_THROW(LrScheduler(sgd, Schedule{}), ConfigError);
  });
}

TEST(LrScaling, GrowsWithTheRanks) {
  spawn(4, [](World& world) {
    EXPECT_EQ(scaled_lr(0.1, world.group(), LrScaling::None), 0.1);
    EXPECT_EQ(scaled_lr(0.1, world.group(), LrScaling::Linear), 0.4);
    EXPECT_EQ(scaled_lr(0.1, world.group(), LrScaling::Sqrt), 0.2);
  });
}

}  // namespace
}  // namespace lockstep::test
