// What belongs to a whole run: schedules over it, its best checkpoint, steps without an update.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"
#include "train/net.h"

namespace lockstep {
namespace {

using test::Folder;
using test::spawn;
using test::TrainNet;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using train::Callback;
using train::Requests;
using train::RunState;

// The rate of each step, and a request to stop in one of them.
struct Rates : Callback {
  explicit Rates(int64_t last) : stop(last) {}
  void on_step_end(const RunState& state, Requests& requests) override {
    all.push_back(state.learning_rate);
    if (state.step + 1 == stop) requests.stop();  // happens after the next step
  }
  int64_t stop;
  std::vector<double> all;
};

struct Found {
  std::vector<double> rates;
  RunState state;
};

Found whole_run(World& world, train::TrainerOptions options, int64_t stop = -1) {
  torch::manual_seed(1);
  TrainNet net;
  const auto samples = test::train_samples(80);
  const auto rates = std::make_shared<Rates>(stop);
  options.callbacks = {rates};
  train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
  trainer.run();
  return {rates->all, trainer.state()};
}

train::TrainerOptions line_to_zero(const std::string& directory) {
  return {.optimizer = train::sgd({.lr = 1.0}),
          .learning_rate = train::linear_decay(),
          .epochs = 2,
          .loader = {.batch_size = 5},
          .saving = {.directory = directory}};
}

TEST(OtherRanks, AScheduleOverTheRunEndsWithIt) {
  const Folder folder;
  spawn(2, [&](World& world) {  // 8 steps an epoch
    EXPECT_THAT(whole_run(world, line_to_zero(folder / "run"), 8).rates,
                ElementsAre(1.0, 15 / 16.0, 14 / 16.0, 13 / 16.0, 12 / 16.0, 11 / 16.0, 10 / 16.0,
                            9 / 16.0));
  });
  spawn(4, [&](World& world) {  // 4 steps an epoch
    const auto found = whole_run(world, line_to_zero(folder / "run"), 10);
    EXPECT_THAT(found.rates, ElementsAre(0.5, 0.375));
    EXPECT_EQ(found.state.steps, 12);
  });
  spawn(1, [&](World& world) {  // 16 steps an epoch, of which the first half is made
    const auto found = whole_run(world, line_to_zero(folder / "run"));
    EXPECT_THAT(found.rates, ElementsAre(0.25, 7 / 32.0, 6 / 32.0, 5 / 32.0, 4 / 32.0, 3 / 32.0,
                                         2 / 32.0, 1 / 32.0));
    EXPECT_EQ(found.state.step, 18);
    EXPECT_EQ(found.state.steps, 18);
  });
}

TEST(OtherRanks, AScheduleOverANumberOfStepsCountsThem) {
  const Folder folder;
  const auto options = [&] {
    auto all = line_to_zero(folder / "run");
    all.max_steps = 4;
    return all;
  };
  spawn(2, [&](World& world) { whole_run(world, options(), 2); });
  spawn(1, [&](World& world) {
    EXPECT_THAT(whole_run(world, options()).rates, ElementsAre(0.5, 0.25));
  });
}

TEST(OtherRanks, ARateThatFollowsAMetricIsScaledByThem) {
  const Folder folder;
  const auto held_out = test::train_samples(10, 7);
  const auto options = [&](int64_t epochs) {
    return train::TrainerOptions{
        .optimizer = train::sgd({.lr = 0.01}),
        .learning_rate = train::on_plateau(
            {.better = train::Better::Higher, .factor = 0.5, .patience = 0, .threshold = 1e6}),
        .lr_scaling = LrScaling::Linear,
        .epochs = epochs,
        .loader = {.batch_size = 20},
        .evaluation = {.data = held_out},
        .saving = {.directory = folder / "run"}};
  };
  spawn(2, [&](World& world) {  // 2 steps an epoch; the second epoch's end halves the rate
    EXPECT_THAT(whole_run(world, options(2)).rates, ElementsAre(0.02, 0.02, 0.02, 0.02));
  });
  spawn(1, [&](World& world) {
    EXPECT_THAT(whole_run(world, options(3)).rates, ElementsAre(0.005, 0.005, 0.005, 0.005));
  });
  spawn(1, [&](World& world) {  // halved twice by now, and of another rate
    auto slower = options(4);
    slower.optimizer = train::sgd({.lr = 0.004});
    EXPECT_THAT(whole_run(world, slower).rates, ElementsAre(0.001, 0.001, 0.001, 0.001));
  });
}

TEST(Parts, APartThatIsUpdatedMoreOftenHasTheScheduleOfTheRun) {
  spawn(2, [](World& world) {
    TrainNet critic, actor;
    const auto samples = test::train_samples(40);
    std::vector<double> critics, actors;
    train::Trainer trainer(
        world, {{.name = "critic", .model = critic}, {.name = "actor", .model = actor}},
        [&](train::Step& step) {
          const auto update = [&](const char* name, TrainNet& net) {
            step.update(name, [&](const Batch& b) {
              return torch::nn::functional::cross_entropy(net->forward(b.data), b.target);
            });
            return step.state().learning_rate;
          };
          for (int i = 0; i < 3; ++i) critics.push_back(update("critic", critic));
          if (step.state().step % 2 == 0) actors.push_back(update("actor", actor));
        },
        samples,
        {.optimizer = train::sgd({.lr = 1.0}),
         .learning_rate = train::linear_decay(),
         .epochs = 1,
         .loader = {.batch_size = 5}});
    trainer.run();
    EXPECT_THAT(critics, ElementsAre(1, 1, 1, 0.75, 0.75, 0.75, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25));
    EXPECT_THAT(actors, ElementsAre(1, 0.5));
  });
}

TEST(Rates, OfAWarmUpRiseToTheFirstOneOfTheSchedule) {
  const auto whole =
      train::follow([](int64_t steps) { return one_cycle_lr({.steps = steps}); }, {.steps = 10})
          .schedule(110);
  const double first = one_cycle_lr({.steps = 100}).lr(1, 0);
  EXPECT_LT(first, 0.1);
  EXPECT_EQ(whole.lr(1, 0), 0);
  EXPECT_EQ(whole.lr(1, 5), first / 2);
  EXPECT_EQ(whole.lr(1, 10), first);
  for (int64_t step = 1; step < 39; ++step) EXPECT_GT(whole.lr(1, step), whole.lr(1, step - 1));
}

TEST(Rates, ThatACallbackSetsAreRefused) {
  for (const int64_t at : {0, 2}) {  // 0: before the run
    spawn(at == 0 ? 1 : 2, [&](World& world) {
      TrainNet net;
      const auto samples = test::train_samples(80);
      std::unique_ptr<train::Trainer> trainer;
      const auto set = [&] { trainer->optimizer().param_groups()[0].options().set_lr(0.5); };
      trainer = std::make_unique<train::Trainer>(
          world, net, train::cross_entropy(), samples,
          train::TrainerOptions{.optimizer = train::sgd({.lr = 0.25}),
                                .epochs = 1,
                                .loader = {.batch_size = 5},
                                .callbacks = {std::make_shared<test::AtStep>(at, set)}});
      if (at == 0) set();
      // A rank whose peer was faster has its error by way of the peer.
      EXPECT_THAT(test::message_of([&] { trainer->run(); }),
                  AllOf(HasSubstr("parameter group 0 was set to 0.5"), HasSubstr("had set 0.25"),
                        HasSubstr("TrainerOptions::learning_rate")));
      EXPECT_EQ(trainer->state().step, at);
    });
  }
}

TEST(Rates, ThatFollowAMetricMayBeSet) {
  spawn(1, [](World& world) {
    TrainNet net;
    const auto samples = test::train_samples(40);
    std::unique_ptr<train::Trainer> trainer;
    const auto set = [&] { trainer->optimizer().param_groups()[0].options().set_lr(0.5); };
    trainer = std::make_unique<train::Trainer>(
        world, net, train::cross_entropy(), samples,
        train::TrainerOptions{.optimizer = train::sgd({.lr = 0.25}),
                              .learning_rate = train::on_plateau(),
                              .epochs = 1,
                              .loader = {.batch_size = 5},
                              .evaluation = {.data = samples},
                              .callbacks = {std::make_shared<test::AtStep>(2, set)}});
    EXPECT_EQ(trainer->run().state.learning_rate, 0.5);
  });
}

// As a training's loss is called, too.
TEST(Best, OfAMetricThatIsCalledTrainLoss) {
  const Folder folder;
  spawn(1, [&](World& world) {
    TrainNet net;
    const auto samples = test::train_samples(20);
    double value = 5;
    train::Trainer trainer(
        world, net, train::cross_entropy(), samples,
        {.optimizer = train::sgd({.lr = 0.1}),
         .epochs = 3,
         .loader = {.batch_size = 10},
         .evaluation = {.data = samples,
                        .measure =
                            [&](const data::Batch&) {
                              return std::map<std::string, double>{{"train_loss", value}};
                            }},
         .saving = {.directory = folder / "run",
                    .keep_last = 1,
                    .best = train::Best{.metric = "train_loss"}},
         .callbacks = {std::make_shared<test::AtStep>(3, [&] { value = 4; }),
                       std::make_shared<test::AtStep>(5, [&] { value = 9; })}});
    EXPECT_THAT(trainer.run().best, testing::EndsWith("/run/step-00000004"));
  });
}

// Ends with its best evaluation, in a step that every_steps has saved before it.
TEST(Best, ComesBackWhenTheLastStepWasSavedBeforeItsEvaluation) {
  const Folder folder;
  spawn(2, [&](World& world) {
    TrainNet net;
    const auto samples = test::train_samples(80);
    const auto held_out = test::train_samples(10, 7);
    auto count = std::make_shared<double>(9);
    train::Trainer trainer(
        world, net, train::cross_entropy(), samples,
        {.max_steps = 4,
         .loader = {.batch_size = 5},
         .evaluation = {.data = held_out,
                        .every_epochs = 0,
                        .measure = [count](const Batch&) -> std::map<std::string, double> {
                          return {{"loss", *count}};
                        }},
         .saving = {.directory = folder / "run",
                    .every_steps = 2,
                    .keep_last = 1,
                    .best = train::Best{.restore_at_end = true}},
         .callbacks = {std::make_shared<test::AtStep>(4, [count] { *count = 1; })}});
    const auto outcome = trainer.run();
    EXPECT_THAT(outcome.best, HasSubstr("/run/step-00000004"));
  });
}

TEST(Best, OfAnotherDirectoryIsNoneOfThisRuns) {
  const Folder folder;
  const auto held_out = test::train_samples(10, 7);
  const auto run = [&](World& world, double loss, const std::string& to, const std::string& from) {
    TrainNet net;
    const auto samples = test::train_samples(80);
    train::Trainer trainer(
        world, net, train::cross_entropy(), samples,
        {.epochs = from.empty() ? 1 : 2,
         .loader = {.batch_size = 5},
         .evaluation = {.data = held_out,
                        .measure =
                            [loss](const Batch&) {
                              return std::map<std::string, double>{{"loss", loss}};
                            }},
         .saving = {
             .directory = to, .best = train::Best{.restore_at_end = true}, .resume_from = from}});
    return trainer.run().best;
  };
  spawn(2, [&](World& world) {
    const auto first = run(world, 1, folder / "a", "");
    EXPECT_THAT(first, HasSubstr("/a/step-00000008"));
    EXPECT_THAT(run(world, 2, folder / "b", first), HasSubstr("/b/step-00000016"));
  });
}

// A run goes back to an older checkpoint of its directory, in which a better one stays that is none
// of its own.
TEST(Best, IsOfTheStepsThatLedToTheEnd) {
  for (const int64_t keep_last : {1, 2}) {
    const Folder folder;
    const auto held_out = test::train_samples(10, 7);
    using ByStep = std::map<int64_t, double>;
    const auto run = [&](const std::string& from, const ByStep& losses, int64_t kept) {
      spawn(2, [&](World& world) {
        TrainNet net;
        const auto samples = test::train_samples(80);
        const auto loss = std::make_shared<double>(9);
        std::vector<std::shared_ptr<train::Callback>> callbacks;
        for (const auto& [step, value] : losses) {
          callbacks.push_back(std::make_shared<test::AtStep>(step, [=] { *loss = value; }));
        }
        train::Trainer trainer(
            world, net, train::cross_entropy(), samples,
            {.max_steps = losses.rbegin()->first,
             .loader = {.batch_size = 5},
             .evaluation = {.data = held_out,
                            .every_epochs = 0,
                            .every_steps = 2,
                            .measure = [loss](const Batch&) -> std::map<std::string, double> {
                              return {{"loss", *loss}};
                            }},
             .saving = {.directory = folder / "run",
                        .every_steps = 2,
                        .keep_last = kept,
                        .best = train::Best{.restore_at_end = true},
                        .resume_from = from},
             .callbacks = callbacks});
        const auto outcome = trainer.run();
        EXPECT_THAT(outcome.best, testing::EndsWith(from.empty() ? "-00000004" : "-00000004.1"));
      });
    };
    run("", {{2, 0.5}, {4, 0.125}}, 0);
    run(folder / "run/step-00000002", {{4, 0.25}, {6, 0.3}, {8, 0.35}}, keep_last);
  }
}

TEST(NonFinite, ASkippedStepLeavesNoRunningStatistics) {
  for (const int64_t lanes : {0, 4}) {
    spawn(2, [&](World& world) {
      TrainNet net;
      const at::Tensor x = at::randn({40, 6});
      x[4].fill_(std::numeric_limits<float>::quiet_NaN());
      const data::TensorDataset spoilt(x, torch::zeros({40}, at::kLong));
      const auto held_out = test::train_samples(10, 7);
      train::Trainer trainer(world, net, train::cross_entropy(), spoilt,
                             {.epochs = 1,
                              .loader = {.batch_size = 5, .shuffle = false, .lanes = lanes},
                              .max_grad_norm = 1,
                              .non_finite = train::NonFinite::Skip,
                              .evaluation = {.data = held_out}});
      const auto outcome = trainer.run();
      EXPECT_EQ(outcome.state.skipped, 1);
      EXPECT_TRUE(std::isfinite(outcome.state.metrics.at("loss")));
      EXPECT_TRUE(test::flat(*net).isfinite().all().item<bool>());
      EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), lanes == 0 ? 3 : 1);
    });
  }
}

// The first one leaves NaN in rank 0's statistics, and the second one leaves them so.
TEST(NonFinite, StepsThatAreSkippedInARowAreNoFaultOfTheProgram) {
  for (const auto mode : {parallel::Buffers::Broadcast, parallel::Buffers::Average}) {
    for (const bool is_divided : {false, true}) {
      spawn(2, [&](World& world) {
        TrainNet net;
        const at::Tensor x = at::randn({40, 6});
        for (const int64_t sample : {10, 20}) {  // rank 0's, of steps 2 and 3
          x[sample].fill_(std::numeric_limits<float>::quiet_NaN());
        }
        train::TrainerOptions options{.epochs = 1,
                                      .loader = {.batch_size = 5, .shuffle = false},
                                      .non_finite = train::NonFinite::Skip};
        options.ddp.buffers = mode;
        if (is_divided) {
          options.ddp = {};
          options.fsdp = parallel::FsdpOptions{.buffers = mode};
        }
        train::Trainer trainer(world, net, train::cross_entropy(),
                               data::TensorDataset(x, torch::zeros({40}, at::kLong)), options);
        ::testing::internal::CaptureStderr();
        EXPECT_EQ(trainer.run().state.skipped, 2);
        EXPECT_THAT(::testing::internal::GetCapturedStderr(),
                    testing::Not(HasSubstr("was changed on this rank")));
        EXPECT_TRUE(net->norm->running_mean.isfinite().all().item<bool>());
      });
    }
  }
}

TEST(NonFinite, ASkippedStepRestoresABufferThatRepeatsItsElements) {
  spawn(2, [](World& world) {
    struct MaskedImpl : torch::nn::Module {
      MaskedImpl() {
        last = register_module("last", torch::nn::Linear(6, 3));
        mask = register_buffer("mask", torch::ones({1, 6}).expand({5, 6}));
      }
      at::Tensor forward(const at::Tensor& x) { return call(last, x * mask); }
      torch::nn::Linear last{nullptr};
      at::Tensor mask;
    };
    const auto net = std::make_shared<MaskedImpl>();
    const at::Tensor x = at::randn({40, 6});
    x[4].fill_(std::numeric_limits<float>::quiet_NaN());
    const data::TensorDataset spoilt(x, torch::zeros({40}, at::kLong));
    train::Trainer trainer(world, net, train::cross_entropy(), spoilt,
                           {.epochs = 1,
                            .loader = {.batch_size = 5, .shuffle = false},
                            .non_finite = train::NonFinite::Skip});
    EXPECT_EQ(trainer.run().state.skipped, 1);
    EXPECT_TRUE(at::equal(net->mask, torch::ones({5, 6})));
    EXPECT_TRUE(test::flat(*net).isfinite().all().item<bool>());
  });
}

TEST(NonFinite, AnOverflowThatTheScalerSkipsReportsNoNorm) {
  struct Norms : Callback {
    void on_step_end(const RunState& state, Requests&) override {
      all.push_back(state.gradient_norm);
    }
    std::vector<std::optional<double>> all;
  };
  spawn(2, [](World& world) {
    for (const double scale : {1e30, 1.0}) {
      TrainNet net;
      const auto samples = test::train_samples(40);
      const auto norms = std::make_shared<Norms>();
      auto options = test::train_options({{"fp16", "clip"}});
      options.scaler.init_scale = scale;
      options.max_steps = 3;
      options.callbacks = {norms};
      train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
      EXPECT_EQ(trainer.run().state.skipped, scale == 1 ? 0 : 3);
      ASSERT_EQ(norms->all.size(), 3u);
      for (const auto& norm : norms->all) {
        ASSERT_EQ(norm.has_value(), scale == 1);
        EXPECT_TRUE(std::isfinite(norm.value_or(0)));
      }
    }
  });
}

}  // namespace
}  // namespace lockstep
