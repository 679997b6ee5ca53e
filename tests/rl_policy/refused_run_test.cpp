// The runs that run_continual() refuses, and the ones that it takes up again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "lockstep/core/error.h"
#include "rl_policy/even_course.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

TEST(RefusedRun, RefusesAFolderWithAnotherRun) {
  const Folder folder;
  left_by_ranks(1, options(folder / "run"));
  spawn(2, [&](World& world) {
    auto o = options(folder / "run");
    EXPECT_THAT(message_of<ConfigError>([&] { rl::run_continual(world, course(), o); }),
                HasSubstr("has a run already; --resume continues it"));
    o.resume = true;
    o.beta = 0.2;
    EXPECT_THAT(message_of<ConfigError>([&] { rl::run_continual(world, course(), o); }),
                HasSubstr("has another run; here: --beta 0.2"));
    o.beta = options("").beta;
    o.log_all = true;
    EXPECT_THAT(message_of<ConfigError>([&] { rl::run_continual(world, course(), o); }),
                HasSubstr("has another run; here: --log-eval-all true"));
  });
}

TEST(RefusedRun, RefusesAFolderInWhichARunIsAtWork) {
  const Folder folder;
  isolated([&] {
    const PreemptionNotice notice;  // of both runs
    auto o = options(folder / "run");
    o.order = {"even"};
    o.iterations = 1;
    const std::string trajectories = o.output_dir + "/trajectories.jsonl";
    const auto refused = [&](const RunOptions& second) {
      EXPECT_THAT(message_of<ConfigError>(
                      [&] { rl::run_continual(World::solo(), course(), second, &notice); }),
                  AllOf(HasSubstr("--output-dir"), HasSubstr("in use: process"),
                        HasSubstr("writes the files of a run here")));
    };
    int worlds = 0, later = 0;
    on_world = [&] {
      auto second = o;
      second.seed = 7;
      if (++worlds == 1) refused(second);  // in the warm-up
      second = o;
      second.resume = true;
      if (!fs::exists(trajectories) || fs::file_size(trajectories) == 0 || later++ > 0) return;
      const std::string before = contents(trajectories);
      refused(second);
      EXPECT_EQ(contents(trajectories), before);
    };
    rl::run_continual(World::solo(), course(), o, &notice);
    EXPECT_GT(later, 0);
  });
}

TEST(RefusedRun, GoesOnWhenItsLauncherStartsItAgain) {
  const Folder folder;
  isolated([&] {
    auto o = options(folder / "run");
    o.order = {"even"};
    o.iterations = 1;
    setenv("TORCHELASTIC_RUN_ID", "first", 1);
    const auto begun = rl::run_continual(World::solo(), course(), o);
    setenv("TORCHELASTIC_RESTART_COUNT", "1", 1);
    EXPECT_EQ(rl::run_continual(World::solo(), course(), o).fingerprint, begun.fingerprint);
    setenv("TORCHELASTIC_RUN_ID", "second", 1);
    EXPECT_THAT(message_of<ConfigError>([&] { rl::run_continual(World::solo(), course(), o); }),
                HasSubstr("has a run already"));
  });
}

TEST(RefusedRun, RefusesTasksThatAreLongerThanItsContext) {
  const Folder folder;
  spawn(2, [&](World& world) {
    auto o = options(folder / "run");
    o.context = 8;
    // Also the second time: what never began is no run.
    for (int i = 0; i < 2; ++i) {
      EXPECT_THAT(message_of<ConfigError>([&] { rl::run_continual(world, course(), o); }),
                  HasSubstr("--context 8: the task even/train/0 begins with "));
    }
  });
}

TEST(RefusedRun, RefusesRanksWithOtherOptions) {
  const Folder folder;
  spawn(2, [&](World& world) {
    auto o = options(folder / "run");
    if (world.rank() == 1) o.learning_rate = 1;
    EXPECT_THAT(message_of<ConfigError>([&] { rl::run_continual(world, course(), o); }),
                HasSubstr("rank 0 has --learning-rate 0.0003, rank 1 has --learning-rate 1"));
  });
}

TEST(RefusedRun, RefusesImpossibleOptions) {
  const Folder folder;
  isolated([&] {
    const auto o = options(folder / "run");
    const auto said = [&](auto change) {
      auto changed = o;
      change(changed);
      return message_of<ConfigError>([&] { rl::run_continual(World::solo(), course(), changed); });
    };
    EXPECT_THAT(said([](RunOptions& x) { x.order = {"moon"}; }),
                HasSubstr("--order names the domain moon; there are again, even"));
    EXPECT_THAT(said([](RunOptions& x) { x.order = {"even", "even"}; }), HasSubstr("twice"));
    EXPECT_THAT(said([](RunOptions& x) { x.env = "tau2"; }), HasSubstr("needs --model"));
    EXPECT_THAT(said([](RunOptions& x) { x.user = "model"; }),
                HasSubstr("--user model needs --env tau2"));
    EXPECT_THAT(said([](RunOptions& x) { x.solo = true; }), HasSubstr("--solo needs --env tau2"));
    const auto tau2 = [](RunOptions& x) {
      x.env = "tau2";
      x.model = "some/model";
      x.solo = true;
    };
    EXPECT_THAT(said([&](RunOptions& x) {
                  tau2(x);
                  x.order = {"airline", "telecom"};
                }),
                HasSubstr("--solo: airline has no solo mode, only telecom has"));
    EXPECT_THAT(said([&](RunOptions& x) {
                  tau2(x);
                  x.order = {"telecom"};
                  x.user = "model";
                }),
                HasSubstr("--solo has no user whom --user model could play"));
    EXPECT_THAT(said([](RunOptions& x) { x.model = "no/model"; }),
                HasSubstr("--model no/model is neither a folder nor a name in"));
    EXPECT_THAT(said([](RunOptions& x) { x.max_grad_norm = 0; }), HasSubstr("--max-grad-norm 0"));
    EXPECT_THAT(said([](RunOptions& x) { x.group_size = 1; }), HasSubstr("learns nothing"));
    EXPECT_THAT(said([](RunOptions& x) { x.clip_low = 2; }), HasSubstr("--clip-low 2"));
    EXPECT_THAT(said([](RunOptions& x) { x.clip_high = -1; }), HasSubstr("--clip-high -1"));
    EXPECT_THAT(said([](RunOptions& x) { x.learning_rate = HUGE_VAL; }),
                HasSubstr("--learning-rate inf has to be finite"));
    EXPECT_THAT(said([](RunOptions& x) { x.replay = 1; }), HasSubstr("--replay 1"));
    EXPECT_THAT(said([](RunOptions& x) { x.temperature = 0; }), HasSubstr("--temperature"));
    EXPECT_THAT(said([](RunOptions& x) { x.output_dir = "/proc/no"; }), HasSubstr("--output-dir"));
    // One that is there and takes no files.
    EXPECT_THAT(said([](RunOptions& x) { x.output_dir = "/proc/self"; }),
                HasSubstr("--output-dir /proc/self: "));
  });
  EXPECT_FALSE(fs::exists(folder / "run"));
}

}  // namespace
}  // namespace lockstep::test
