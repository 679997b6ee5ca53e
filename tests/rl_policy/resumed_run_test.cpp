// Runs that resume on other numbers of ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "lockstep/core/error.h"
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

}  // namespace
}  // namespace lockstep::test
