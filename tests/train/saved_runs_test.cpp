// When a run saves, into a folder that is its own.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/directory.h"
#include "lockstep/train/progress.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"
#include "train/net.h"
#include "train/printed.h"

namespace lockstep {
namespace {

using test::contents;
using test::Folder;
using test::message_of;
using test::small_run;
using test::spawn;
using test::spawn_bare;
using test::TrainNet;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

using Losses = std::map<std::string, double>;

std::vector<std::string> saved_in(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& one : checkpoint::list_checkpoints(directory).checkpoints) {
    names.push_back(one.name);
  }
  return names;
}

// A relative directory is one of the working directory in which the Trainer was made.
TEST(SavedRuns, AProgramMayChangeItsWorkingDirectory) {
  const Folder folder, elsewhere;
  for (const int64_t steps : {4, 8}) {
    spawn(2, [&](World& world) {
      std::filesystem::current_path(folder.path());
      TrainNet net;
      train::TrainerOptions options{.epochs = 0, .max_steps = steps, .loader = {.batch_size = 5}};
      options.evaluation = {.data = test::train_samples(31, 6), .every_steps = 2};
      options.saving = {.directory = "run", .every_steps = 2, .best = train::Best{}};
      options.callbacks = {
          std::make_shared<train::Monitoring>(world, train::MonitorOptions{.directory = "log"})};
      train::Trainer trainer(world, net, train::cross_entropy(), test::train_samples(80), options);
      std::filesystem::current_path(elsewhere.path());
      const auto outcome = trainer.run();
      EXPECT_EQ(outcome.state.resumed_at, steps == 4 ? -1 : 4);
      EXPECT_THAT(outcome.best, testing::StartsWith(folder / "run/step-"));
    });
  }
  EXPECT_TRUE(std::filesystem::is_empty(elsewhere.path()));
  EXPECT_TRUE(std::filesystem::exists(folder / "log/metrics.jsonl"));
}

// The last step of an epoch, and the one of the run.
TEST(SavedRuns, AStepIsSavedOnceWithItsEvaluation) {
  for (const int64_t max_steps : {0, 12}) {
    const Folder folder;
    spawn(2, [&](World& world) {
      TrainNet net;
      const auto samples = test::train_samples(80);
      auto loss = std::make_shared<double>(9);
      train::Trainer(world, net, train::cross_entropy(), samples,
                     {.epochs = 2,
                      .max_steps = max_steps,
                      .loader = {.batch_size = 5},
                      .evaluation = {.data = samples,
                                     .measure = [=](const Batch&) -> Losses {
                                       return {{"loss", *loss *= 0.5}};
                                     }},
                      .saving = {.directory = folder / "run",
                                 .every_steps = 4,
                                 .every_epochs = 1,
                                 .best = train::Best{}}})
          .run();
    });
    const auto all = checkpoint::list_checkpoints(folder / "run").checkpoints;
    const bool ends_early = max_steps > 0;
    ASSERT_EQ(all.size(), ends_early ? 3U : 4U);
    for (size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(all[i].name, fmt::format("step-{:08}", 4 * (i + 1)));
      const bool is_evaluated = i % 2 == 1 || (ends_early && i == 2);
      EXPECT_EQ(all[i].metrics.contains("loss"), is_evaluated) << all[i].name;
    }
  }
}

struct SignalInStep : train::Callback {
  explicit SignalInStep(int64_t number) : step(number) {}
  void on_step_begin(const train::RunState& state) override {
    if (state.step + 1 == step) raise(SIGUSR1);
  }
  void on_evaluate(const train::RunState&, train::Requests&) override { ++evaluations; }
  int64_t step;
  int evaluations = 0;
};

// A signal in the run's last step: the start after it evaluates, and no later one.
TEST(SavedRuns, TheLastEvaluationIsInTheCheckpointThatASignalHasLeftWithoutIt) {
  const Folder folder;
  for (int start = 0; start < 3; ++start) {
    spawn(2, [&](World& world) {
      seed_everything(1, world);
      TrainNet net;
      const auto samples = test::train_samples(80);
      auto options = test::train_options({});
      options.max_steps = 6;
      options.evaluation = {.data = samples, .every_epochs = 0};
      options.saving = {.directory = folder / "run", .keep_last = 1};
      const auto counting = std::make_shared<SignalInStep>(6);
      options.callbacks = {counting};
      const auto outcome =
          train::Trainer(world, net, train::cross_entropy(), samples, options).run();
      EXPECT_EQ(outcome.ended, start == 0 ? train::Ended::Preempted : train::Ended::Finished);
      EXPECT_EQ(counting->evaluations, start == 1 ? 1 : 0) << start;
    });
  }
  const auto all = checkpoint::list_checkpoints(folder / "run").checkpoints;
  ASSERT_EQ(all.size(), 1u);
  EXPECT_TRUE(all[0].metrics.contains("loss"));
}

// Killed between a checkpoint and the next report, which is a long time off.
TEST(SavedRuns, TheLogHasEachStepOnceAfterAKill) {
  const Folder folder;
  const auto is_written = [&] {
    return contents(folder / "log/metrics.jsonl").find("save") != std::string::npos;
  };
  const auto trains = [&](World& world, int64_t killed_in) {
    seed_everything(1, world);
    TrainNet net;
    const auto samples = test::train_samples(80);
    auto options = test::train_options({});
    options.max_steps = 12;
    options.saving = {.directory = folder / "run", .every_steps = 5, .async = false};
    options.callbacks = {
        std::make_shared<train::Monitoring>(
            world, train::MonitorOptions{.directory = folder / "log", .every_steps = 50}),
        std::make_shared<test::AtStep>(killed_in, [&] {
          while (!is_written()) std::this_thread::yield();
          raise(SIGKILL);
        })};
    train::Trainer(world, net, train::cross_entropy(), samples, options).run();
  };
  spawn(2, [&](World& world) { trains(world, 7); }, {.doomed = {0, 1}});
  spawn(2, [&](World& world) { trains(world, 0); });
  std::vector<std::pair<int64_t, int64_t>> reported;
  std::istringstream lines(contents(folder / "log/metrics.jsonl"));
  for (std::string text; std::getline(lines, text);) {
    const auto line = nlohmann::json::parse(text);
    if (line["type"] == "step") reported.emplace_back(line["step"], line["steps"]);
  }
  EXPECT_THAT(reported, ElementsAre(std::pair(5, 5), std::pair(10, 5), std::pair(12, 2)));
}

TEST(SavedRuns, AnEvaluationThatFailsLosesNoSteps) {
  const Folder folder;
  spawn(1, [&](World& world) {
    TrainNet net;
    const auto samples = test::train_samples(40);
    int calls = 0;
    train::Trainer trainer(world, net, train::cross_entropy(), samples,
                           {.epochs = 3,
                            .loader = {.batch_size = 5},
                            .evaluation = {.data = samples,
                                           .batch_size = 40,
                                           .measure = [&](const Batch&) -> Losses {
                                             if (++calls == 2)
                                               throw std::runtime_error("no such metric");
                                             return {{"loss", 1}};
                                           }},
                            .saving = {.directory = folder / "run", .every_epochs = 1}});
    EXPECT_EQ(message_of([&] { trainer.run(); }), "no such metric");
  });
  EXPECT_THAT(saved_in(folder / "run"), ElementsAre("step-00000008", "step-00000016"));
}

// Of the ranks, too, where it is one of all of them.
TEST(SavedRuns, AWatchedMetricThatIsNoneLosesNoSteps) {
  const Folder folder;
  spawn(2, [&](World& world) {
    TrainNet net;
    const auto samples = test::train_samples(40);
    train::Trainer trainer(world, net, train::cross_entropy(), samples,
                           {.epochs = 3,
                            .loader = {.batch_size = 5},
                            .evaluation = {.data = samples,
                                           .measure = [](const Batch&) -> Losses {
                                             return {{"loss", 1}};
                                           }},
                            .early_stopping = train::EarlyStopping{.metric = "los"},
                            .saving = {.directory = folder / "run"}});
    EXPECT_THAT(message_of([&] { trainer.run(); }), HasSubstr("watches 'los'"));
  });
  EXPECT_THAT(saved_in(folder / "run"), ElementsAre("step-00000004"));
}

TEST(SavedRuns, ASecondOneInTheFolderIsRefusedFromTheStart) {
  const Folder folder;
  auto config = small_run(folder / "run");
  config.training.loss = "own";
  int tries = 0;
  train::Registry registry;
  // In the first epoch, before anything is saved.
  registry.add_loss("own", [&](const train::RunConfig&) -> train::Loss {
    return [&, of = train::mse(), calls = 0](const auto& outputs, const auto& targets) mutable {
      if (tries == 0 && ++calls == 3) {
        auto other = config;
        other.training.loss = "mse";
        other.training.seed = 9;
        other.checkpoint.resume = "latest";
        other.checkpoint.save_on_preemption = false;
        const auto before = contents(folder / "run/config.yaml");
        const auto process = fmt::format("process {} on ", getpid());
        EXPECT_THAT(message_of([&] { train::run(other); }),
                    AllOf(HasSubstr("[run] " + (folder / "run") + ": " + process),
                          HasSubstr("writes the files of a run here")));
        EXPECT_EQ(contents(folder / "run/config.yaml"), before);
        other.checkpoint.directory = folder / "run/checkpoints";
        other.logging.output_dir = folder / "other";
        EXPECT_THAT(message_of([&] { train::run(other); }),
                    AllOf(HasSubstr("/run/checkpoints: " + process),
                          HasSubstr("writes checkpoints here already")));
        ++tries;
      }
      return of(outputs, targets);
    };
  });
  spawn_bare(1, [&](int) {
    EXPECT_EQ(train::run(config, registry), 0);
    EXPECT_EQ(tries, 1);
    // Both are free again.
    config.training.loss = "mse";
    config.checkpoint.resume = "latest";
    EXPECT_EQ(train::run(config), 0);
  });
}

TEST(SavedRuns, ThatGoOnSaySo) {
  const Folder folder;
  auto config = small_run(folder / "run");
  test::printed(1, config);
  config.training.epochs = 4;
  config.checkpoint.resume = "latest";
  const auto again = test::printed(1, config);
  EXPECT_THAT(again, HasSubstr("\n80 steps in 4 epochs; "));
  EXPECT_THAT(again, HasSubstr(fmt::format("\nresuming from step 60 of 80 ({}/run/checkpoints/"
                                           "step-00000060)\n",
                                           folder.path())));
  // On half as many ranks the rest of the epochs has twice as many steps.
  config.logging.output_dir = folder / "ranks";
  config.training.epochs = 2;
  test::printed(2, config);
  config.training.epochs = 4;
  EXPECT_THAT(test::printed(1, config), HasSubstr("\n60 steps in 4 epochs; "));
}

TEST(SavedRuns, AResultHasTheStatusThatTheProgramEndsWith) {
  const Folder folder;
  auto config = small_run(folder / "run");
  config.training.loss = "own";
  for (const bool is_wrong : {true, false}) {
    train::Registry registry;
    registry.add_loss("own", [=](const train::RunConfig&) -> train::Loss {
      return [=](const at::Tensor&, const at::Tensor&) -> at::Tensor {
        if (is_wrong) throw ConfigError("not so");
        throw DataError("not these");
      };
    });
    spawn_bare(
        1, [&](int) { EXPECT_NE(message_of([&] { train::run(config, registry); }), "nothing"); });
    const auto result = nlohmann::json::parse(contents(folder / "run/result.json"));
    EXPECT_EQ(result["exit_status"], is_wrong ? 2 : 1);
  }
}

TEST(SavedRuns, AResultHasTheValueOfTheBestCheckpoint) {
  const Folder folder;
  auto config = small_run(folder / "run");
  const auto result = [&] {
    test::printed(1, config);
    return nlohmann::json::parse(contents(folder / "run/result.json"));
  };
  EXPECT_TRUE(result().at("best_value").is_null());
  // The first evaluation: the loss falls.
  config = small_run(folder / "run");
  config.checkpoint.directory = folder / "saved";
  config.checkpoint.best_metric = "loss";
  config.checkpoint.best_mode = "max";
  const auto best = result();
  EXPECT_EQ(best.at("best_metric"), "loss");
  EXPECT_EQ(best.at("best_step"), 20);
  EXPECT_GT(best.at("best_value"), best.at("metrics").at("loss"));
}

TEST(SavedRuns, AWarmUpThatIsLongerThanTheRunIsWarnedOf) {
  const Folder folder;
  auto config = small_run(folder / "run");
  config.schedule.warmup_steps = 1;
  config.training.max_steps = 1;
  testing::internal::CaptureStderr();
  const std::string said = test::printed(1, config);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("[run] schedule.warmup_steps is 1, and the run has 1 step: it never has"));
  EXPECT_THAT(said, AllOf(HasSubstr(" after 1 step of warm-up"), HasSubstr("\n1 step; sgd"),
                          Not(HasSubstr("1 steps"))));
}

TEST(SavedRuns, AResumeThatIsRefusedLeavesTheResultAndTheConfiguration) {
  const Folder folder;
  auto config = small_run(folder / "run");
  test::printed(1, config);
  const std::string result = contents(folder / "run/result.json");
  const std::string was = contents(folder / "run/config.yaml");
  EXPECT_THAT(result, HasSubstr("\"finished\""));
  config.checkpoint.resume = "latest";
  config.model.linear.bias = false;
  spawn_bare(1, [&](int) {
    EXPECT_THAT(message_of([&] { train::run(config, {}); }), HasSubstr("does not fit"));
  });
  EXPECT_EQ(contents(folder / "run/result.json"), result);
  EXPECT_EQ(contents(folder / "run/config.yaml"), was);
  config.model.linear.bias = true;
  EXPECT_THAT(test::printed(1, config), HasSubstr("the run was complete already"));
}

TEST(SavedRuns, MetricsThatTheClassesDoNotHaveAreRefusedAtTheStart) {
  const Folder folder;
  for (const std::string metric : {"auc", "top_k", "r2"}) {
    auto config = small_run(folder / metric);
    config.data.kind = "own";
    config.training.metrics = {metric};
    train::Registry registry;
    registry.add_data("own", [](const train::RunConfig&, const World&) -> train::RunData {
      return {.training = std::make_shared<data::TensorDataset>(test::train_samples(40)),
              .classes = 3};
    });
    spawn_bare(1, [&](int) {
      EXPECT_THAT(message_of<ConfigError>([&] { train::run(config, registry); }),
                  AllOf(HasSubstr("training.metrics: " + metric), HasSubstr("have 3 classes")));
    });
  }
  auto config = small_run(folder / "values");
  config.data.kind = "own";
  config.training.metrics = {"accuracy"};
  train::Registry registry;
  registry.add_data("own", [](const train::RunConfig&, const World&) -> train::RunData {
    const auto set = std::make_shared<data::TensorDataset>(at::rand({40, 4}), at::rand({40}));
    return {.training = set};
  });
  spawn_bare(1, [&](int) {
    EXPECT_THAT(message_of<ConfigError>([&] { train::run(config, registry); }),
                HasSubstr("training.metrics: accuracy is of classes; the data have values"));
  });
}

}  // namespace
}  // namespace lockstep
