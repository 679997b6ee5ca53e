// How long ranks wait for the episodes of the others.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "lockstep/core/error.h"
#include "rl/run/plan.h"
#include "rl_policy/even_course.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

// Rank 1 plays until rank 0 has ended: in place of the group's 60 seconds it waits for none.
TEST(RolloutTimeout, IsThePlans) {
  const Folder folder;
  spawn(2, [&](World& world) {
    const std::string ended = folder / "ended";
    const rl::RolloutPlan plan{.episodes = std::vector<rl::Planned>(2),
                               .lanes = 2,
                               .timeout = std::chrono::milliseconds(0)};
    const auto play = [&](const std::vector<rl::Planned>& episodes) {
      while (world.rank() == 1 && !std::filesystem::exists(ended)) std::this_thread::yield();
      return std::vector<rl::Played>(episodes.size());
    };
    const auto begin = std::chrono::steady_clock::now();
    const auto said = message_of<CommError>([&] { rl::run_rollout(plan, world.group(), play); });
    EXPECT_THAT(said, testing::HasSubstr(world.rank() == 0 ? "outcomes" : "["));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
    write(ended, "");
  });
}

TEST(RolloutTimeout, IsTheRunsInItsPlans) {
  auto o = options("run");
  const auto curriculum = rl::plan_curriculum(course(), o);
  const rl::Unit learn{rl::Unit::Kind::Learn, 0, 0, false};
  EXPECT_EQ(rl::plan_learning(curriculum, course(), o, learn).timeout, std::chrono::minutes(30));
  o.rollout_timeout = 7;
  EXPECT_EQ(rl::plan_learning(curriculum, course(), o, learn).timeout, std::chrono::seconds(7));
  EXPECT_EQ(rl::plan_evaluation(curriculum, o, 0).timeout, std::chrono::seconds(7));
  o.rollout_timeout = 0;
  EXPECT_THAT(message_of<ConfigError>([&] { o.check(); }),
              testing::HasSubstr("--rollout-timeout 0 has to be"));
}

}  // namespace
}  // namespace lockstep::test
