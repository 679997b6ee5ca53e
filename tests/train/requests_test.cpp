// What callbacks have asked for, when a run is left and is started again.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>
#include <memory>
#include <string>
#include <utility>

#include "lanes/training.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/directory.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "train/net.h"

namespace lockstep {
namespace {

using test::contents;
using test::Folder;
using test::result_of;
using test::spawn;
using test::TrainNet;
using train::Ended;
using train::RunState;

// The last rank asks for an evaluation after each 3rd step, and for a stop after the 14th. A signal
// comes in step `at`.
struct Asking : train::Callback {
  Asking(int64_t step, int number) : at(step), signal(number) {}
  void on_step_begin(const RunState& state) override {
    if (state.step + 1 == at && signal == SIGUSR1) raise(signal);
  }
  void on_step_end(const RunState& state, train::Requests& requests) override {
    if (state.step == at && signal == SIGKILL) raise(signal);
    if (state.rank < state.ranks - 1) return;
    if (state.step % 3 == 2) requests.evaluate();
    if (state.step == 13) requests.stop();
  }
  int64_t at;
  int signal;
};

// Epochs of 8 steps. Each evaluation but the first halves the rate.
train::Outcome trained(World& world, TrainNet& net, const train::Saving& saving, int64_t at,
                       int signal) {
  seed_everything(1, world);
  net = TrainNet();
  const auto samples = test::train_samples(80), held_out = test::train_samples(10, 6);
  auto options = test::train_options({{"sgd"}});
  options.epochs = 3;
  options.evaluation = {.data = held_out};
  options.learning_rate = train::on_plateau(
      {.better = train::Better::Higher, .factor = 0.5, .patience = 0, .threshold = 1e6});
  options.saving = saving;
  options.callbacks = {std::make_shared<Asking>(at, signal)};
  train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
  auto outcome = trainer.run();
  // That of the next step; a run that has made none does not know its last one's.
  outcome.state.learning_rate = trainer.optimizer().param_groups()[0].options().get_lr();
  return outcome;
}

// What an undisturbed run leaves, too: parameters, the rate, how it ended.
uint64_t left_by(const train::Saving& saving, int64_t at = 0) {
  return result_of({"auto", 2}, [&](World& world) {
    TrainNet net{nullptr};
    const auto outcome = trained(world, net, saving, at, SIGUSR1);
    EXPECT_EQ(outcome.ended == Ended::Preempted, at > 0) << at;
    for (const auto& parameter : net->parameters()) parameter.mutable_grad() = at::Tensor();
    const at::Tensor others =
        at::tensor({outcome.state.learning_rate, static_cast<double>(outcome.state.step),
                    static_cast<double>(outcome.ended)},
                   at::kDouble);
    return test::chained(test::lane_hash(*net), parallel::fingerprint(others));
  });
}

TEST(Requests, AreDoneThoughASignalHasLeftNoTimeForThem) {
  const Folder folder;
  const uint64_t expected = left_by({.directory = folder / "calm"});
  EXPECT_NE(expected, 0u);
  for (int64_t at = 1; at <= 14; ++at) {
    const train::Saving saving{.directory = folder / std::to_string(at)};
    left_by(saving, at);
    EXPECT_EQ(left_by(saving), expected) << at;
  }
  // Once in the step that is asked, and once in the one that was to have it.
  const train::Saving twice{.directory = folder / "twice"};
  for (const int64_t at : {5, 6, 13, 14}) left_by(twice, at);
  EXPECT_EQ(left_by(twice), expected);
}

TEST(Requests, AreInTheCheckpointOfTheStepThatIsAsked) {
  const Folder folder;
  const auto saving = [&](const std::string& name) {
    return train::Saving{
        .directory = folder / name, .every_steps = 1, .keep_last = 2, .async = false};
  };
  const uint64_t expected = left_by(saving("calm"));
  EXPECT_NE(expected, 0u);
  for (const int64_t at : {3, 4, 9}) {
    const auto own = saving(std::to_string(at));
    spawn(2,
          [&](World& world) {
            TrainNet net{nullptr};
            trained(world, net, own, at, SIGKILL);
          },
          {.doomed = {0, 1}});
    EXPECT_EQ(left_by(own), expected) << at;
  }
}

// The last rank asks for a stop after step `at`, or a signal comes in it.
struct AskingOnce : train::Callback {
  AskingOnce(int64_t step, int number) : at(step), signal(number) {}
  void on_step_begin(const RunState& state) override {
    if (state.step + 1 == at && signal != 0) raise(signal);
  }
  void on_step_end(const RunState& state, train::Requests& requests) override {
    if (state.step == at && state.rank == state.ranks - 1) requests.stop();
  }
  int64_t at;
  int signal;
};

// What step 5 has besides, and another may not: it evaluates, saves, ends an epoch.
enum class Besides { Nothing, Evaluation, Save, EpochEnd };

// How a run ends that asks for a stop after step 5.
std::pair<Ended, int64_t> ended_by(World& world, const std::string& directory, Besides besides,
                                   int signal) {
  seed_everything(1, world);
  const auto samples = test::train_samples(besides == Besides::EpochEnd ? 50 : 80);
  auto options = test::train_options({{"sgd"}});
  options.evaluation = {.data = test::train_samples(10, 6),
                        .every_steps = besides == Besides::Evaluation ? 5 : 0};
  options.saving = {.directory = directory, .every_steps = besides == Besides::Save ? 5 : 0};
  options.callbacks = {std::make_shared<AskingOnce>(5, signal)};
  TrainNet net;
  const auto outcome = train::Trainer(world, net, train::cross_entropy(), samples, options).run();
  return {outcome.ended, outcome.state.step};
}

TEST(Requests, OfAStepsEndHappenAfterTheNextStepWhateverThatStepHasBesides) {
  const Folder folder;
  spawn(2, [&](World& world) {
    const std::pair expected{Ended::Stopped, int64_t{6}};
    for (int which = 0; which < 4; ++which) {
      const auto besides = static_cast<Besides>(which);
      const std::string calm = folder / std::to_string(which), rough = calm + "_left";
      EXPECT_EQ(ended_by(world, calm, besides, 0), expected) << which;
      EXPECT_EQ(ended_by(world, rough, besides, SIGUSR1), (std::pair{Ended::Preempted, int64_t{5}}))
          << which;
      EXPECT_EQ(ended_by(world, rough, besides, 0), expected) << which;
    }
  });
}

// There is no next step, and nothing else saves it.
TEST(Requests, OfTheLastStepSaveIt) {
  struct AsksToSave : train::Callback {
    void on_step_end(const RunState& state, train::Requests& requests) override {
      if (state.step == 4 && state.rank == 1) requests.save();
    }
  };
  const Folder folder;
  for (const int64_t resumed_at : {-1, 4}) {
    spawn(2, [&](World& world) {
      TrainNet net;
      auto options = test::train_options({});
      options.epochs = 1;
      options.saving = {.directory = folder / "run", .at_end = false};
      options.callbacks = {std::make_shared<AsksToSave>()};
      const auto samples = test::train_samples(40);
      train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
      const RunState state = trainer.run().state;
      EXPECT_EQ(state.step, 4);
      EXPECT_EQ(state.resumed_at, resumed_at);
    });
    EXPECT_EQ(checkpoint::list_checkpoints(folder / "run").checkpoints.size(), 1u);
  }
}

TEST(Requests, AStopThatASignalHasHiddenEndsTheNextRunOnly) {
  const Folder folder;
  const train::Saving saving{.directory = folder / "run"};
  const auto run = [&](int64_t at, Ended why, int64_t step) {
    spawn(2, [&](World& world) {
      TrainNet net{nullptr};
      const auto outcome = trained(world, net, saving, at, SIGUSR1);
      EXPECT_EQ(outcome.ended, why);
      EXPECT_EQ(outcome.state.step, step);
    });
  };
  run(14, Ended::Preempted, 14);
  run(0, Ended::Stopped, 14);
  run(0, Ended::Finished, 24);
}

TEST(Requests, ACheckpointOfAnEarlierVersionHasNone) {
  const Folder folder;
  const train::Saving saving{.directory = folder / "run"};
  left_by(saving, 14);
  const std::string path = *checkpoint::newest_checkpoint(saving.directory) + "/manifest.json";
  auto manifest = checkpoint::manifest_from(contents(path), path);
  ASSERT_EQ(manifest.values.erase("trainer/owed"), 1u);
  test::write(path, checkpoint::to_json(manifest));
  spawn(2, [&](World& world) {
    TrainNet net{nullptr};
    EXPECT_EQ(trained(world, net, saving, 0, SIGUSR1).ended, Ended::Finished);
  });
}

}  // namespace
}  // namespace lockstep
