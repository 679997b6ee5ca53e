// A training that was stopped and started again ends as one that was not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>

#include "lanes/training.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/directory.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"
#include "train/net.h"

namespace lockstep {
namespace {

using test::AtStep;
using test::Features;
using test::Folder;
using test::message_of;
using test::result_of;
using test::spawn;
using test::TrainNet;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;
using train::Ended;
using train::RunState;

// What a run leaves: parameters, buffers, the last evaluation's loss.
uint64_t hash_of(const TrainNet& net, const RunState& state) {
  uint64_t sum = test::lane_hash(*net);
  const auto loss = state.metrics.find("loss");
  if (loss != state.metrics.end()) {
    sum = test::chained(sum, parallel::fingerprint(at::tensor({loss->second}, at::kDouble)));
  }
  return test::chained(sum, static_cast<uint64_t>(state.step));
}

train::TrainerOptions saving(const Features& features, const std::string& directory) {
  auto options = test::train_options(features);
  options.epochs = 3;
  options.saving = {.directory = directory, .every_steps = 4, .keep_last = 2};
  options.saving.async = features.has("async");
  if (features.has("best")) {
    options.saving.best = train::Best{};
    options.early_stopping = train::EarlyStopping{.patience = 20};
  }
  static const auto held_out = test::train_samples(31, 6);
  options.evaluation = {.data = held_out, .every_epochs = 1, .every_steps = 5};
  if (features.has("plateau")) {
    options.learning_rate = train::on_plateau({.factor = 0.5, .patience = 0});
  }
  return options;
}

uint64_t trained(World& world, const train::TrainerOptions& options) {
  seed_everything(1, world);
  TrainNet net;
  const auto samples = test::train_samples(113);
  train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
  const auto outcome = trainer.run();
  for (const auto& parameter : net->parameters()) parameter.mutable_grad() = at::Tensor();
  return hash_of(net, outcome.state);
}

struct Stopped {
  Features features;
  int ranks;          // of the undisturbed run
  int64_t at;         // step at which the others are killed
  int before, after;  // ranks
};
void PrintTo(const Stopped& stopped, std::ostream* out) {
  *out << stopped.features.text() << "_" << stopped.at;
}

class Killed : public testing::TestWithParam<Stopped> {};

INSTANTIATE_TEST_SUITE_P(
    Features, Killed,
    testing::Values(
        Stopped{{{"accumulation", "average", "plateau"}}, 2, 13, 2, 2},
        Stopped{{{"fp16", "average", "clip", "zero", "hook", "cosine", "async"}}, 2, 23, 2, 2},
        Stopped{{{"best", "sync_bn", "sgd"}}, 2, 29, 2, 2},
        Stopped{{{"lanes", "average", "zero", "best", "async"}}, 1, 10, 2, 3},
        Stopped{{{"lanes", "plateau"}}, 4, 9, 3, 1}),
    [](const auto& test) { return test.param.features.text(); });

TEST_P(Killed, AndResumedItHasTheBitsOfAnUndisturbedRun) {
  const auto& [features, ranks, at, before, after] = GetParam();
  const Folder calm, rough;
  const auto expected = result_of({"auto", ranks}, [&](World& world) {
    return trained(world, saving(features, calm / "run"));
  });
  std::vector<int> doomed;
  for (int rank = 0; rank < before; ++rank) doomed.push_back(rank);
  spawn(before,
        [&](World& world) {
          auto options = saving(features, rough / "run");
          options.callbacks = {std::make_shared<AtStep>(at, [] { raise(SIGKILL); })};
          trained(world, options);
        },
        {.doomed = doomed});
  const auto found = result_of({"auto", after}, [&](World& world) {
    return trained(world, saving(features, rough / "run"));
  });
  EXPECT_NE(expected, 0u);
  EXPECT_EQ(found, expected);
}

// Leaves a run after its step `at`: by a signal, or by a request.
struct Leave : train::Callback {
  Leave(int64_t step, bool signals) : at(step), by_signal(signals) {}
  void on_step_end(const RunState& state, train::Requests& requests) override {
    if (state.step != at - 1) return;  // both happen in the next step
    if (by_signal) {
      raise(SIGUSR1);
    } else {
      requests.stop();
    }
  }
  int64_t at;
  bool by_signal;
};

// The rate is halved by each evaluation but the first, so that one more or less is seen.
TEST(Resuming, EvaluationsCountAsInARunThatWasNotLeft) {
  const Folder folder;
  const auto options = [&](const std::string& name, int64_t at, bool by_signal) {
    auto all = saving({{"best"}}, folder / name);
    all.learning_rate = train::on_plateau(
        {.better = train::Better::Higher, .factor = 0.5, .patience = 0, .threshold = 1e6});
    if (at > 0) all.callbacks = {std::make_shared<Leave>(at, by_signal)};
    return all;
  };
  const auto run = [&](const std::string& name, int64_t at, bool by_signal) {
    return result_of({"auto", 2},
                     [&](World& world) { return trained(world, options(name, at, by_signal)); });
  };
  const uint64_t expected = run("calm", 0, false);
  // 5 has an evaluation, which a signal leaves no time for; 7 has none, and a request makes one.
  for (const auto& [at, by_signal] : {std::pair<int64_t, bool>{5, true}, {7, false}, {12, true}}) {
    const std::string name = std::to_string(at);
    EXPECT_NE(run(name, at, by_signal), expected);
    EXPECT_EQ(run(name, 0, false), expected) << at;
  }
}

TEST(Resuming, AFinishedRunHasNothingLeftToDo) {
  const Folder folder;
  for (int round = 0; round < 2; ++round) {
    spawn(2, [&](World& world) {
      seed_everything(1, world);
      TrainNet net;
      const auto samples = test::train_samples(40), held_out = test::train_samples(11, 6);
      int64_t steps = 0;
      auto options = test::train_options({});
      options.saving.directory = folder / "run";
      options.evaluation.data = held_out;
      struct Count : train::Callback {
        explicit Count(int64_t& number) : count(number) {}
        void on_step_end(const RunState&, train::Requests&) override { ++count; }
        int64_t& count;
      };
      options.callbacks = {std::make_shared<Count>(steps)};
      train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
      const auto outcome = trainer.run();
      EXPECT_EQ(outcome.ended, Ended::Finished);
      EXPECT_EQ(steps, round == 0 ? 8 : 0);
      EXPECT_EQ(outcome.state.step, 8);
      EXPECT_EQ(outcome.state.resumed_at, round == 0 ? -1 : 8);
      EXPECT_EQ(outcome.state.samples, 80);
      EXPECT_EQ(outcome.state.metrics.count("loss"), 1u);
    });
  }
}

// What evaluations find, one after another; what watches it, and the last learning rate.
struct Watched {
  std::string metric;
  train::Better better;
  std::vector<double> values;
};

train::Outcome trained_and_watched(World& world, const std::string& directory,
                                   const Watched& watched) {
  TrainNet net;
  const auto samples = test::train_samples(10), held_out = test::train_samples(5, 6);
  auto options = test::train_options({{"sgd"}});
  size_t next = 0;
  options.evaluation = {.data = held_out,
                        .every_epochs = 1,
                        .measure = [&](const Batch&) -> std::map<std::string, double> {
                          return {{watched.metric, watched.values.at(next++)}};
                        }};
  options.epochs = 20;
  options.max_steps = 2 * static_cast<int64_t>(watched.values.size());
  const auto newest = checkpoint::newest_checkpoint(directory);
  if (newest) options.max_steps += checkpoint::Checkpoint(*newest).manifest().step;
  options.learning_rate =
      train::on_plateau({.better = watched.better, .factor = 0.5, .patience = 0}, watched.metric);
  options.early_stopping =
      train::EarlyStopping{.metric = watched.metric, .better = watched.better, .patience = 0};
  options.saving = {.directory = directory, .keep_last = 1};
  options.saving.best = train::Best{.metric = watched.metric, .better = watched.better};
  return train::Trainer(world, net, train::cross_entropy(), samples, options).run();
}

TEST(Resuming, WithAnotherMetricTheOldOnesBestDoesNotCount) {
  const Folder folder;
  const auto best = [](const train::Outcome& outcome) {
    return checkpoint::Checkpoint(outcome.best).manifest().metrics;
  };
  for (const Watched& next :
       {Watched{"loss", train::Better::Lower, {50, 40}}, {"score", train::Better::Lower, {9, 8}}}) {
    const std::string directory = folder / next.metric;
    spawn(1, [&](World& world) {
      trained_and_watched(world, directory, {"score", train::Better::Higher, {1, 2}});
    });
    spawn(1, [&](World& world) {
      const auto outcome = trained_and_watched(world, directory, next);
      EXPECT_EQ(outcome.ended, Ended::Finished) << next.metric;
      EXPECT_EQ(outcome.state.step, 8);
      EXPECT_EQ(outcome.state.learning_rate, 0.05);
      ASSERT_NE(outcome.best, "");
      EXPECT_EQ(best(outcome).at(next.metric), next.values.back());
    });
    // The same one is compared with what it was, as in one run, also where a checkpoint of an
    // earlier version does not say which it is.
    const std::string path = *checkpoint::newest_checkpoint(directory) + "/manifest.json";
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    auto manifest = checkpoint::manifest_from(text.str(), path);
    ASSERT_EQ(manifest.values.erase("trainer/watched"), 1u);
    std::ofstream(path) << checkpoint::to_json(manifest);
    spawn(1, [&](World& world) {
      const auto outcome =
          trained_and_watched(world, directory, {next.metric, next.better, {60, 70}});
      EXPECT_EQ(outcome.ended, Ended::Early);
      EXPECT_EQ(outcome.state.step, 10);
      EXPECT_EQ(best(outcome).at(next.metric), next.values.back());
    });
  }
}

TEST(Resuming, OptionsOfAnOptimizerThatTheCheckpointHasOtherwiseAreWarnedOf) {
  const Folder folder;
  const auto run = [&](World& world, bool zero, double decay, int64_t epochs) {
    TrainNet net;
    const auto samples = test::train_samples(40);
    auto options = test::train_options({});
    // Its schedule moves the betas, too.
    options.optimizer = train::adamw({.lr = 1e-2 / static_cast<double>(epochs),
                                      .eps = decay < 0.1 ? 1e-6 : 1e-8,
                                      .weight_decay = decay});
    options.learning_rate = train::follow(one_cycle_lr({.steps = 100}));
    options.zero = zero;
    options.epochs = epochs;
    options.saving = {.directory = folder / (zero ? "zero" : "plain")};
    testing::internal::CaptureStderr();
    train::Trainer(world, net, train::cross_entropy(), samples, options).run();
    return testing::internal::GetCapturedStderr();
  };
  for (const bool zero : {false, true}) {
    spawn(2, [&](World& world) {
      const auto warning = HasSubstr("of the checkpoint is used");
      EXPECT_THAT(run(world, zero, 0.1, 1), Not(warning));
      EXPECT_THAT(run(world, zero, 0.1, 2), Not(warning));
      const std::string said = run(world, zero, 0.01, 3);
      if (!world.is_main()) {
        EXPECT_THAT(said, Not(warning));
        return;
      }
      EXPECT_THAT(said,
                  AllOf(HasSubstr("group/0/weight_decay: 0.1 of the checkpoint is used, not "
                                  "0.01"),
                        HasSubstr("group/0/eps: 1e-08 of the checkpoint is used, not 1e-06")));
      EXPECT_THAT(said, Not(AnyOf(HasSubstr("group/0/lr"), HasSubstr("betas"))));
    });
  }
}

TEST(Resuming, AFolderOfAnotherRunIsNotWrittenOver) {
  const Folder folder;
  const auto run = [&](World& world, train::Resume resume) {
    TrainNet net;
    const auto samples = test::train_samples(40);
    auto options = test::train_options({});
    options.saving = {.directory = folder / "run", .resume = resume};
    train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
    trainer.run();
  };
  spawn(2, [&](World& world) { run(world, train::Resume::Never); });
  spawn(2, [&](World& world) {
    EXPECT_THAT(message_of<ConfigError>([&] { run(world, train::Resume::Never); }),
                HasSubstr("/run has checkpoints of a run already, such as "));
  });
}

// It would remove the other's checkpoints as its own.
TEST(Resuming, FromAnotherFolderIntoThatOfAThirdRunIsRefused) {
  const Folder folder;
  const auto run = [&](const std::string& to, const std::string& from, int64_t epochs) {
    spawn(2, [&](World& world) {
      TrainNet net;
      const auto samples = test::train_samples(40);
      auto options = test::train_options({});
      options.epochs = epochs;
      options.saving = {.directory = folder / to, .keep_last = 1, .resume_from = from};
      train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
      if (to == "b" && !from.empty()) {
        EXPECT_THAT(message_of<ConfigError>([&] { trainer.run(); }),
                    HasSubstr("/b has checkpoints of a run already, such as "));
      } else {
        trainer.run();
      }
    });
  };
  const auto newest = [&](const char* of) { return checkpoint::newest_checkpoint(folder / of); };
  run("a", "", 1);
  run("b", "", 1);
  const auto of_b = newest("b");
  run("b", *newest("a"), 2);
  EXPECT_EQ(newest("b"), of_b);
  run("c", *newest("a"), 2);
  EXPECT_NE(newest("c"), std::nullopt);
  run("a", *newest("a") + "/", 2);
}

TEST(Resuming, FromAnotherFolderARestartedJobGoesOnInItsOwn) {
  const Folder folder;
  const auto run = [&](const std::string& to, const std::string& from, int64_t epochs,
                       const char* restarts) {
    spawn(1, [&](World& world) {
      setenv("LOCKSTEP_JOB_ID", "one", 1);
      setenv("TORCHELASTIC_RESTART_COUNT", restarts, 1);
      TrainNet net;
      const auto samples = test::train_samples(40);
      auto options = test::train_options({});
      options.epochs = epochs;
      options.saving = {.directory = folder / to, .resume_from = from};
      train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
      EXPECT_EQ(trainer.run().state.resumed_at, from.empty() ? -1 : 8 * (epochs - 1));
    });
  };
  run("a", "", 1, "0");
  const auto from = checkpoint::newest_checkpoint(folder / "a");
  run("b", *from, 2, "0");
  run("b", *from, 3, "1");
}

uint64_t trained_in_stages(World& world, const std::string& directory, int64_t stop) {
  seed_everything(1, world);
  TrainNet net;
  const auto easy = test::train_samples(30, 1), hard = test::train_samples(50, 2);
  auto options = test::train_options({});
  options.epochs = 0;
  options.stages = {{.name = "easy", .data = easy, .epochs = 2},
                    {.name = "mixed", .data = hard, .steps = 4, .batch_size = 3},
                    {.name = "hard", .data = hard, .epochs = 1}};
  options.saving = {.directory = directory, .every_steps = 1, .keep_last = 1, .async = false};
  options.callbacks = {std::make_shared<AtStep>(stop, [] { raise(SIGKILL); })};
  train::Trainer trainer(world, net, train::cross_entropy(), {}, options);
  EXPECT_EQ(trainer.state().steps, 6 + 4 + 5);
  trainer.run();
  EXPECT_EQ(trainer.state().stage, "hard");
  for (const auto& parameter : net->parameters()) parameter.mutable_grad() = at::Tensor();
  return test::lane_hash(*net);
}

TEST(Resuming, StagesGoOnWhereTheyWere) {
  const Folder folder;
  const test::Ranks ranks{"auto", 2};
  const auto run = [&](const std::string& name, int64_t stop) {
    return [&folder, name, stop](World& world) {
      return trained_in_stages(world, folder / name, stop);
    };
  };
  const uint64_t expected = result_of(ranks, run("calm", -1));
  EXPECT_NE(expected, 0u);
  for (const int64_t stop : {7, 11}) {  // on_step_end comes before the checkpoint of the step
    spawn(2, run("rough" + std::to_string(stop), stop), {.doomed = {0, 1}});
    EXPECT_EQ(result_of(ranks, run("rough" + std::to_string(stop), -1)), expected) << stop;
  }
}

// The steps of a stage that is shorter now were taken from those of the next one.
TEST(Stages, AStageThatIsShorterWhereTheRunResumesLeavesTheNextOneItsSteps) {
  const Folder folder;
  struct Rates : train::Callback {
    void on_step_end(const RunState& state, train::Requests&) override {
      lowest = std::min(lowest, state.learning_rate);
    }
    double lowest = 1;
  };
  for (const int64_t first : {8, 4}) {
    spawn(1, [&](World& world) {
      TrainNet net;
      const auto samples = test::train_samples(30);
      const auto rates = std::make_shared<Rates>();
      auto options = test::train_options({{"sgd"}});
      options.epochs = 0;
      options.learning_rate = train::linear_decay();
      options.stages = {{.name = "first", .data = samples, .steps = first},
                        {.name = "second", .data = samples, .steps = 8}};
      options.max_steps = first == 8 ? 7 : 0;
      options.saving = {.directory = folder / "run"};
      options.callbacks = {rates};
      train::Trainer trainer(world, net, train::cross_entropy(), {}, options);
      const RunState state = trainer.run().state;
      EXPECT_EQ(state.step, first == 8 ? 7 : 15);
      EXPECT_EQ(state.steps, state.step);
      EXPECT_GT(rates->lowest, 0);
    });
  }
}

// Each stage counts its epochs from 0.
TEST(Stages, DrawNumbersOfTheirOwn) {
  spawn(1, [](World& world) {
    TrainNet net;
    const auto samples = test::train_samples(8, 1);
    std::vector<double> drawn;
    const train::Loss loss = [&](const at::Tensor& output, const at::Tensor& target) {
      drawn.push_back(torch::rand({}).item<double>());
      return torch::nn::functional::cross_entropy(output, target);
    };
    auto options = test::train_options({{"lanes"}});
    options.epochs = 0;
    options.stages = {{.name = "first", .data = samples, .steps = 1},
                      {.name = "second", .data = samples, .steps = 1}};
    train::Trainer(world, net, loss, {}, options).run();
    ASSERT_GT(drawn.size(), 2u);
    EXPECT_EQ(std::set<double>(drawn.begin(), drawn.end()).size(), drawn.size());
  });
}

}  // namespace
}  // namespace lockstep
