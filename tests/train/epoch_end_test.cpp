// What leaves no time for an epoch's end: a signal in its last step, or an evaluation that fails.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lanes/training.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"
#include "train/net.h"

namespace lockstep {
namespace {

using test::Folder;
using test::message_of;
using test::spawn;
using test::TrainNet;
using train::Ended;
using train::RunState;

// Why the step is the last of more than its epoch.
enum class Last { OfStage, OfRun, OfAStop };

using Events = std::vector<std::pair<std::string, int64_t>>;

struct Listing : train::Callback {
  explicit Listing(Events& list) : events(list) {}
  void on_step_begin(const RunState& state) override {
    if (state.step + 1 == signal_at) raise(SIGUSR1);
  }
  void on_step_end(const RunState& state, train::Requests& requests) override {
    if (state.step == stop_after - 1) requests.stop();
    if (state.step == evaluate_after - 1) requests.evaluate();
  }
  void on_evaluate(const RunState& state, train::Requests&) override {
    events.emplace_back("evaluate", state.step);
    if (state.step == signal_in) raise(SIGUSR1);
  }
  void on_epoch_end(const RunState& state, train::Requests&) override {
    events.emplace_back("end " + state.stage, state.step);
  }
  Events& events;
  int64_t signal_at = 0, signal_in = 0, stop_after = 0, evaluate_after = 0;
};

struct Trace {
  Events events;
  double rate = 0;
  uint64_t hash = 0;
  friend bool operator==(const Trace&, const Trace&) = default;
};

// One start. Each evaluation but the first halves the rate. Epochs of 8 steps.
struct FailingStart {
  Last last;
  int64_t signal_at = 0;
  bool is_last = false;
  int64_t fails_at = 0;        // whose evaluation
  int64_t evaluate_after = 0;  // by request
  int64_t evaluate_every = 0;  // steps, beside each epoch's end
  int64_t signal_in = 0;       // whose evaluation
  int64_t save_every = 0;      // steps, and not at the end
};

Ended started(World& world, Trace& run, const std::string& directory, const FailingStart& start) {
  const Last last = start.last;
  seed_everything(1, world);
  TrainNet net;
  const auto samples = test::train_samples(40), held_out = test::train_samples(10, 6);
  auto options = test::train_options({{"sgd"}});
  options.epochs = last == Last::OfStage ? 0 : 3;
  if (last == Last::OfStage) {
    options.stages = {{.name = "easy", .data = samples, .steps = 16},
                      {.name = "hard", .data = samples, .epochs = 1}};
  }
  if (last == Last::OfRun && !start.is_last) options.max_steps = 16;
  options.evaluation = {.data = held_out, .every_epochs = 1, .every_steps = start.evaluate_every};
  options.learning_rate = train::on_plateau(
      {.better = train::Better::Higher, .factor = 0.5, .patience = 0, .threshold = 1e6});
  options.saving = {
      .directory = directory, .every_steps = start.save_every, .at_end = start.save_every == 0};
  const auto listing = std::make_shared<Listing>(run.events);
  listing->signal_at = start.signal_at;
  listing->signal_in = start.signal_in;
  listing->evaluate_after = start.evaluate_after;
  if (last == Last::OfAStop) listing->stop_after = 16;
  options.callbacks = {listing};
  const train::Trainer* made = nullptr;
  const train::Loss loss = [&made, fails = start.fails_at](const auto& output, const auto& target) {
    if (!at::GradMode::is_enabled() && fails > 0 && made->state().step == fails) {
      throw std::runtime_error("broken");
    }
    return train::cross_entropy()(output, target);
  };
  train::Trainer trainer(world, net, loss, last == Last::OfStage ? train::DataSource() : samples,
                         options);
  made = &trainer;
  const auto outcome = trainer.run();
  run.rate = trainer.optimizer().param_groups()[0].options().get_lr();
  for (const auto& parameter : net->parameters()) parameter.mutable_grad() = at::Tensor();
  run.hash = test::lane_hash(*net);
  return outcome.ended;
}

TEST(EpochEnd, ComesFirstWhereTheRunResumes) {
  for (const Last last : {Last::OfStage, Last::OfRun, Last::OfAStop}) {
    const Folder folder;
    spawn(1, [&](World& world) {
      Trace calm, rough;
      const Ended ended = started(world, calm, folder / "calm", {last});
      EXPECT_EQ(ended, last == Last::OfAStop ? Ended::Stopped : Ended::Finished);
      EXPECT_EQ(started(world, rough, folder / "rough", {last, 16}), Ended::Preempted);
      EXPECT_EQ(started(world, rough, folder / "rough", {last}), ended);
      EXPECT_EQ(rough, calm) << static_cast<int>(last);
      // The checkpoint is that of the undisturbed run, too.
      started(world, calm, folder / "calm", {.last = last, .is_last = true});
      EXPECT_EQ(started(world, rough, folder / "rough", {.last = last, .is_last = true}),
                Ended::Finished);
      EXPECT_EQ(rough, calm) << static_cast<int>(last);
      EXPECT_EQ(rough.events.size(), 6u);
    });
  }
}

TEST(EpochEnd, ComesWhereTheRunResumesAfterAnEvaluationThatFailed) {
  for (const Last last : {Last::OfStage, Last::OfRun}) {
    const Folder folder;
    spawn(1, [&](World& world) {
      Trace calm, rough;
      EXPECT_EQ(started(world, calm, folder / "calm", {last}), Ended::Finished);
      EXPECT_EQ(message_of([&] {
                  started(world, rough, folder / "rough", {.last = last, .fails_at = 16});
                }),
                "broken");
      EXPECT_EQ(started(world, rough, folder / "rough", {last}), Ended::Finished);
      EXPECT_EQ(rough, calm) << static_cast<int>(last);
    });
  }
}

// One that a signal leaves, and that is started twice more.
void expect_as_undisturbed(const FailingStart& undisturbed, const FailingStart& left) {
  const Folder folder;
  spawn(1, [&](World& world) {
    Trace calm, rough;
    EXPECT_EQ(started(world, calm, folder / "calm", undisturbed), Ended::Finished);
    EXPECT_EQ(started(world, rough, folder / "rough", left), Ended::Preempted);
    for (int start = 0; start < 2; ++start) {
      EXPECT_EQ(started(world, rough, folder / "rough", undisturbed), Ended::Finished);
      EXPECT_EQ(rough, calm);
    }
  });
}

// The run that resumes has nothing else to save.
TEST(EpochEnd, ComesOnceAfterASignalInTheEvaluationOfTheLastStep) {
  const FailingStart undisturbed{.last = Last::OfRun, .is_last = true, .evaluate_every = 8};
  FailingStart left = undisturbed;
  left.signal_in = 24;
  expect_as_undisturbed(undisturbed, left);
}

// It came at each further start.
TEST(EpochEnd, ComesOnceInARunThatDoesNotSaveAtItsEnd) {
  for (const bool in_evaluation : {false, true}) {
    const FailingStart undisturbed{.last = Last::OfRun, .is_last = true, .save_every = 8};
    FailingStart left = undisturbed;
    (in_evaluation ? left.signal_in : left.signal_at) = 24;
    expect_as_undisturbed(undisturbed, left);
  }
}

// Which nothing but the callback's request makes.
TEST(EpochEnd, ARequestedEvaluationThatFailedIsMadeWhereTheRunResumes) {
  const Folder folder;
  spawn(1, [&](World& world) {
    Trace calm, rough;
    const FailingStart asked{.last = Last::OfRun, .evaluate_after = 12};
    EXPECT_EQ(started(world, calm, folder / "calm", asked), Ended::Finished);
    FailingStart failing = asked;
    failing.fails_at = 12;
    EXPECT_EQ(message_of([&] { started(world, rough, folder / "rough", failing); }), "broken");
    EXPECT_EQ(started(world, rough, folder / "rough", asked), Ended::Finished);
    EXPECT_EQ(rough, calm);
  });
}

struct Late : train::Callback {
  void on_step_begin(const RunState&) override {
    using Clock = std::chrono::steady_clock;
    for (const auto until = Clock::now() + std::chrono::milliseconds(1); Clock::now() < until;) {
    }
  }
};

// It was one that the time limit had ended, which is started again for the rest.
TEST(EpochEnd, OfTheLastEpochFinishesARunThatIsAtItsTimeLimit) {
  spawn(2, [](World& world) {
    TrainNet net;
    const auto samples = test::train_samples(10);  // one step
    auto options = test::train_options({});
    options.epochs = 1;
    options.max_time = std::chrono::milliseconds(1);
    options.callbacks = {std::make_shared<Late>()};
    train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
    EXPECT_EQ(trainer.run().ended, Ended::Finished);
  });
}

}  // namespace
}  // namespace lockstep
