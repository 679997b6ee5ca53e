// Runs that a scheduler's notice ends somewhere save, and are resumed with the same bits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>

#include "lockstep/core/preemption.h"
#include "rl/run/play_unit.h"
#include "rl_policy/even_course.h"

namespace lockstep::test {
namespace {

using testing::HasSubstr;
using testing::Not;

// Which rank of two gets the signal, as so many of its worlds have begun.
struct Notice {
  const char* name;
  int rank;
  int worlds;
  const char* left_undone;  // what its trajectories lack
};

class PreemptedRun : public testing::TestWithParam<Notice> {
 public:
  static void SetUpTestSuite() {
    const Folder folder;
    undisturbed_ = left_by_ranks(1, options(folder / "run"));
  }

 protected:
  static inline Left undisturbed_;
};

TEST_P(PreemptedRun, LeavesWhatItIsAtAndResumesWithTheSameBits) {
  const Folder folder;
  auto o = options(folder / "run");
  o.resume = true;
  const Notice& notice = GetParam();
  spawn(2, [&](World& world) {
    int worlds = 0;
    on_world = [&] {
      if (++worlds == notice.worlds && world.rank() == notice.rank) raise(SIGTERM);
    };
    EXPECT_TRUE(rl::run_continual(world, course(), o).preempted);
  });
  const std::string trajectories = o.output_dir + "/trajectories.jsonl";
  if (std::filesystem::exists(trajectories)) {  // not before the warm-up is over
    EXPECT_THAT(contents(trajectories), Not(HasSubstr(notice.left_undone)));
  }
  EXPECT_EQ(left_by_ranks(3, o), undisturbed_);
}

// Worlds as in killed_run_test.cpp.
INSTANTIATE_TEST_SUITE_P(Stages, PreemptedRun,
                         testing::Values(Notice{"WarmUp", 1, 620, "phase"},
                                         Notice{"Baselines", 1, 638, "phase"},
                                         Notice{"Rollout", 0, 668, "\"phase\":\"learn\""},
                                         Notice{"Evaluation", 1, 646, "\"domain\":\"again\""}),
                         [](const auto& test) { return test.param.name; });

// Rank 1 played its second lane, too.
TEST(PreemptedRunOf, ARankWithoutASignalLeavesItsRollout) {
  const Folder folder;
  spawn(2, [&](World& world) {
    int worlds = 0;
    on_world = [&] {  // each rank's first one of the first iteration, as in killed_run_test.cpp
      ++worlds;
      if (world.rank() == 0 && worlds == 665) {
        world.store().wait({"begun"});
        raise(SIGTERM);
      } else if (world.rank() == 1 && worlds == 647) {
        world.store().set("begun", "");
        world.store().wait({rl::kNoticeKey});
      }
    };
    EXPECT_TRUE(rl::run_continual(world, course(), options(folder / "run")).preempted);
    if (world.rank() == 1) {
      EXPECT_EQ(worlds, 649);
    } else {  // which serves the store, and may end first
      EXPECT_FALSE(world.store().contains(rl::kNoticeKey));
    }
  });
}

TEST(PreemptedRunOf, AProgramUsesItsOwnNotice) {
  const Folder folder;
  spawn(2, [&](World& world) {
    const PreemptionNotice notice;
    if (world.rank() == 1) raise(SIGUSR1);
    EXPECT_TRUE(rl::run_continual(world, course(), options(folder / "run"), &notice).preempted);
  });
}

}  // namespace
}  // namespace lockstep::test
