// Runs that resume on other numbers of ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "lockstep/core/error.h"
#include "rl/run/policy.h"
#include "rl/run/record.h"
#include "rl_policy/even_course.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

// Of a run whose lanes were not given.
TEST(ResumedRun, HasTheLanesThatItBeganWithOnFewerRanks) {
  const Folder folder;
  auto o = options(folder / "run");
  o.lanes = 0;
  const auto left_by_job = [&](int ranks) {
    spawn(ranks, [&](World& world) {
      setenv("TORCHELASTIC_RUN_ID", "job", 1);
      setenv("TORCHELASTIC_RESTART_COUNT", ranks == 2 ? "0" : "1", 1);
      rl::run_continual(world, course(), o);
    });
    return left_by(o.output_dir);
  };
  const Left begun = left_by_job(2);
  EXPECT_THAT(contents(o.output_dir + "/run.txt"), testing::HasSubstr("--lanes 2\n"));
  EXPECT_EQ(left_by_job(1), begun);  // restarted
  o.resume = true;
  EXPECT_EQ(left_by_ranks(1, o), begun);
  const auto refused = [](const RunOptions& other) {
    return message_of<ConfigError>([&] { rl::run_continual(World::solo(), course(), other); });
  };
  spawn(3, [&](World& world) {
    EXPECT_THAT(
        message_of<ConfigError>([&] { rl::run_continual(world, course(), o); }),
        testing::HasSubstr("here: --lanes 3; it began with --lanes 2: resume it with these, "
                           "on at most 2 ranks"));
  });
  isolated([&] {
    o.lanes = 1;
    EXPECT_THAT(refused(o), testing::HasSubstr("here: --lanes 1; it began with --lanes 2"));
    o.lanes = 0;
    o.output_dir = folder / "new";
    EXPECT_THAT(rl::describe_run(course(), o, 3), testing::HasSubstr("3 ranks with 3 lanes"));
    o.output_dir = folder / "run";
    EXPECT_THAT(rl::describe_run(course(), o, 1), testing::HasSubstr("1 rank with 2 lanes"));
  });
}

TEST(ResumedRun, DoesNotLeaveOutWhatItBeganWith) {
  const Folder folder;
  auto o = options(folder / "run");
  left_by_ranks(1, o);
  o.resume = true;
  const auto run_txt = o.output_dir + "/run.txt";
  write(run_txt, contents(run_txt) + "--again-tasks \n");  // which is not to have any
  left_by_ranks(1, o);
  write(run_txt, contents(run_txt) + "--even-tasks my.json (123)\n");
  isolated([&] {
    EXPECT_THAT(message_of<ConfigError>([&] { rl::run_continual(World::solo(), course(), o); }),
                testing::HasSubstr("has another run; here: no --even-tasks my.json (123)"));
  });
}

// They would save, and communicate, at different times.
TEST(ResumedRun, SavesAndExportsOnAllRanks) {
  const Folder folder;
  spawn(2, [&](World& world) {
    auto o = options(folder / "run");
    if (world.rank() == 1) o.save_every = 2;
    EXPECT_THAT(message_of<ConfigError>([&] { rl::run_continual(world, course(), o); }),
                testing::HasSubstr("rank 0 has --save-every 1, rank 1 has --save-every 2"));
    o = options(folder / "run");
    o.export_hf = world.rank() == 1;
    EXPECT_THAT(message_of<ConfigError>([&] { rl::run_continual(world, course(), o); }),
                testing::HasSubstr("rank 0 has --export-hf false, rank 1 has --export-hf true"));
  });
}

TEST(AllowTurns, AreEnoughForEachTaskOfADifficulty) {
  isolated([] {
    auto o = rl::tiny_preset();
    for (const int64_t difficulty : {1, 2, 3}) {
      o.difficulty = difficulty;
      rl::allow_turns(o);
      const auto course = rl::embedded_course(o);
      rl::RolloutPlan plan;
      for (const auto& [name, arena] : course.arenas) {
        auto keys = arena.domain->tasks("test");
        keys.resize(200);
        for (const auto& key : keys) plan.episodes.push_back({key});
      }
      EXPECT_EQ(rl::scripted(course, plan, rl::limits_of(o), comm::Group(), course.oracle), 1)
          << difficulty;
    }
    o.max_turns = 5;
    rl::allow_turns(o);  // it was given once
    EXPECT_EQ(o.max_turns, 5);
  });
}

}  // namespace
}  // namespace lockstep::test
