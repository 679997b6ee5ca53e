// Where a run resumes when its launcher starts the ranks again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <stdexcept>

#include "checkpoint/format/directory/folder_lock.h"
#include "lockstep/checkpoint/directory.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"
#include "train/net.h"

namespace lockstep {
namespace {

using test::AtStep;
using test::Folder;
using test::message_of;
using test::spawn;
using test::TrainNet;
using testing::HasSubstr;

// A start of a job, which saves every 2nd of 12 steps.
struct Start {
  std::string job;
  const char* restarts = "0";
  std::string from = {};
  int64_t breaks_after = 0;  // step; 0: it does not
  train::Resume resume = train::Resume::Latest;
  bool saves_when_asked = false;  // as after step 3, and not otherwise
  bool reads_only = false;        // as a user who may not write
};

struct AsksForOne : train::Callback {
  void on_step_end(const train::RunState& state, train::Requests& requests) override {
    if (state.step == 3) requests.save();
  }
};

class RestartedJob : public testing::TestWithParam<int64_t> {
 protected:
  // The step at which it resumes.
  void expect_resumed(const Start& start, int64_t at) {
    spawn(2, [&](World& world) {
      setenv("LOCKSTEP_JOB_ID", start.job.c_str(), 1);
      setenv("TORCHELASTIC_RESTART_COUNT", start.restarts, 1);
      if (start.reads_only && geteuid() == 0) {
        ASSERT_EQ(seteuid(65534), 0);
      }
      seed_everything(1, world);
      TrainNet net;
      const auto samples = test::train_samples(120);
      auto options = test::train_options({});
      options.max_steps = 12;
      options.saving = {.directory = run_,
                        .every_steps = 2,
                        .keep_last = GetParam(),
                        .resume = start.resume,
                        .resume_from = start.from};
      options.callbacks = {
          std::make_shared<AtStep>(start.breaks_after, [] { throw std::runtime_error("broken"); })};
      if (start.saves_when_asked) {
        options.saving.every_steps = 0;
        options.saving.at_end = false;
        options.callbacks.push_back(std::make_shared<AsksForOne>());
      }
      train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
      EXPECT_EQ(message_of([&] { trainer.run(); }) == "nothing", start.breaks_after == 0);
      EXPECT_EQ(trainer.state().resumed_at, at);
    });
  }
  std::string saved(int step) const { return run_ + "/step-0000000" + std::to_string(step); }

  Folder folder_;
  const std::string run_ = folder_ / "run";
};

INSTANTIATE_TEST_SUITE_P(KeepLast, RestartedJob, testing::Values(0, 2));

TEST_P(RestartedJob, ThatWentBackInItsFolderGoesOnWithWhatItHasSavedSince) {
  expect_resumed({.job = "a", .breaks_after = 7}, -1);
  const std::string from = saved(4);
  // The checkpoint of step 6 is none of job b's, which saves its own of that step.
  expect_resumed({.job = "b", .from = from, .breaks_after = 5}, 4);
  expect_resumed({.job = "b", .restarts = "1", .from = from, .breaks_after = 9}, 4);
  EXPECT_EQ(std::filesystem::exists(from), GetParam() == 0);
  expect_resumed({.job = "b", .restarts = "2", .from = from, .breaks_after = 11}, 8);
  expect_resumed({.job = "b", .restarts = "3", .from = from}, 10);
}

// torchrun's jobs may all have one name.
TEST_P(RestartedJob, HasNothingOfAnEarlierOneOfItsName) {
  expect_resumed({.job = "a", .breaks_after = 7}, -1);
  expect_resumed({.job = "a", .from = saved(4), .breaks_after = 5}, 4);
  expect_resumed({.job = "a", .restarts = "1", .from = saved(4), .breaks_after = 5}, 4);
}

// It took the earlier job's checkpoint of step 6 for its own.
TEST_P(RestartedJob, HasNothingOfAnEarlierOneBeforeACallbackSaves) {
  expect_resumed({.job = "a", .breaks_after = 7}, -1);
  Start start{.job = "a", .from = saved(4), .breaks_after = 5};
  start.saves_when_asked = true;
  expect_resumed(start, 4);
  start.restarts = "1";
  expect_resumed(start, 4);
}

// It threw, since it could not remove the name of the earlier one.
TEST_P(RestartedJob, MayOnlyReadWhatAnEarlierOneOfItsNameHasSaved) {
  expect_resumed({.job = "a", .breaks_after = 7}, -1);
  std::filesystem::permissions(folder_.path(), std::filesystem::perms(0755));
  std::filesystem::permissions(run_, std::filesystem::perms(0555));
  Start start{.job = "a", .from = saved(4)};
  start.saves_when_asked = start.reads_only = true;
  expect_resumed(start, 4);
  std::filesystem::permissions(run_, std::filesystem::perms(0755));
}

// A run that may never save: job a works there.
TEST_P(RestartedJob, GoesOnBesideOneThatOnlyBeganWithItsCheckpoint) {
  expect_resumed({.job = "a", .breaks_after = 7}, -1);
  Start other{.job = "b", .from = saved(4), .breaks_after = 5};
  other.saves_when_asked = true;
  expect_resumed(other, 4);
  expect_resumed({.job = "a", .restarts = "1", .breaks_after = 9}, 6);
}

// As the last, of jobs of torchrun's that have one name: it was refused, as another run's.
TEST_P(RestartedJob, GoesOnBesideOneOfItsNameThatOnlyBeganWithItsCheckpoint) {
  expect_resumed({.job = "a", .breaks_after = 7, .resume = train::Resume::Never}, -1);
  {
    const auto works = checkpoint::FolderLock::of_checkpoints(run_);
    Start other{.job = "a", .from = saved(4), .breaks_after = 5};
    other.saves_when_asked = true;
    expect_resumed(other, 4);
  }
  expect_resumed({.job = "a", .restarts = "1", .resume = train::Resume::Never}, 6);
}

TEST_P(RestartedJob, GoesOnWhereAFirstStartHadToBeANewRun) {
  using train::Resume;
  expect_resumed({.job = "a", .breaks_after = 1, .resume = Resume::Never}, -1);
  expect_resumed({.job = "a", .restarts = "1", .breaks_after = 7, .resume = Resume::Never}, -1);
  expect_resumed({.job = "a", .restarts = "2", .resume = Resume::Never}, 6);
}

// It was refused, as another run's.
TEST_P(RestartedJob, GoesOnWithWhatOnlyACallbackHasSaved) {
  Start start{.job = "a", .breaks_after = 6, .resume = train::Resume::Never};
  start.saves_when_asked = true;
  expect_resumed(start, -1);
  start.restarts = "1";
  expect_resumed(start, 4);
}

TEST_P(RestartedJob, OfACheckpointThatIsNotThereIsToldSo) {
  expect_resumed({.job = "a", .breaks_after = 7}, -1);
  spawn(1, [&](World& world) {
    for (const std::string from : {"/step-00000005", "/step-00000005/"}) {
      TrainNet net;
      const auto samples = test::train_samples(120);
      auto options = test::train_options({});
      options.saving = {.directory = run_, .resume_from = run_ + from};
      train::Trainer trainer(world, net, train::cross_entropy(), samples, options);
      EXPECT_THAT(message_of<CheckpointError>([&] { trainer.run(); }), HasSubstr("step-00000005"));
    }
  });
}

}  // namespace
}  // namespace lockstep
