// Runs of 2^63 - 1 epochs or micro-batches, which end otherwise.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <memory>
#include <vector>

#include "support/spawn.h"
#include "train/net.h"

namespace lockstep {
namespace {

using test::spawn;
using train::RunState;

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// Ends in the first epoch.
struct Ending : train::Callback {
  void on_step_end(const RunState& state, train::Requests& requests) override {
    rates.push_back(state.learning_rate);
    if (state.step == 3) requests.stop();
  }
  std::vector<double> rates;
};

// The rates of the first 4 steps.
std::vector<double> rates_of(World& world, train::TrainerOptions options) {
  seed_everything(1, world);
  test::TrainNet net;
  const auto samples = test::train_samples(20);
  const auto ending = std::make_shared<Ending>();
  options.learning_rate = train::cosine_decay();
  options.callbacks = {ending};
  for (auto& stage : options.stages) stage.data = samples;
  train::Trainer(world, net, train::cross_entropy(),
                 options.stages.empty() ? train::DataSource(samples) : train::DataSource(), options)
      .run();
  return ending->rates;
}

// The products overflowed: at the end of -4 steps, which kMost epochs of 4 made, a schedule was
// after the first step, and 0 steps were refused.
TEST(Endless, ScheduleDoesNotEnd) {
  spawn(1, [](World& world) {
    const std::vector<double> whole(4, 0.05);
    for (const int64_t epochs : {kMost, kMost / 2 + 1}) {
      auto options = test::train_options({{"sgd"}});
      options.epochs = epochs;
      EXPECT_EQ(rates_of(world, options), whole) << epochs;
    }
    auto stages = test::train_options({{"sgd"}});
    stages.epochs = 0;
    stages.stages = {{.name = "first", .steps = kMost}, {.name = "second", .epochs = kMost}};
    EXPECT_EQ(rates_of(world, stages), whole);
  });
}

TEST(Endless, AllBatchesOfAnEpochAreOneStep) {
  spawn(1, [](World& world) {
    auto options = test::train_options({{"sgd"}});
    options.epochs = 8;
    options.accumulation = kMost;
    const auto rates = rates_of(world, options);
    options.accumulation = 4;
    EXPECT_EQ(rates, rates_of(world, options));
  });
}

}  // namespace
}  // namespace lockstep
