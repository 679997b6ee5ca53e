#include "lockstep/plan/goodput.h"

#include <gtest/gtest.h>

#include "lockstep/core/error.h"

namespace lockstep::plan {
namespace {

Reliability job(int64_t ranks) {
  return {.ranks = ranks, .rank_failure_interval = 50000 * 3600.0, .save = 60, .restart = 300};
}

TEST(Goodput, TheBestIntervalIsYoungsAndDalys) {
  for (const int64_t ranks : {1, 64, 1024, 10000, 100000}) {
    const auto reliability = job(ranks);
    const double best = best_interval(reliability);
    // Young's is the first order: right where a save is short against the time between failures.
    if (ranks <= 1024) {
      EXPECT_NEAR(young_interval(reliability) / best, 1, 0.03) << ranks;
    }
    EXPECT_NEAR(daly_interval(reliability) / best, 1, 0.005) << ranks;
    EXPECT_GT(goodput(reliability, best), goodput(reliability, 1.3 * best));
    EXPECT_GT(goodput(reliability, best), goodput(reliability, best / 1.3));
  }
}

// A restart takes its time after each failure, however often the run is saved.
TEST(Goodput, TheBestIntervalDoesNotDependOnTheRestart) {
  for (const double save : {0.001, 1.0, 500.0}) {
    Reliability reliability = {
        .ranks = 1000000, .rank_failure_interval = 1e6, .save = save, .restart = 0};
    const double best = best_interval(reliability);
    EXPECT_GT(best, 1e-3) << save;
    reliability.restart = 5000;  // after which nothing gets done
    EXPECT_EQ(goodput(reliability, best), 0);
    EXPECT_DOUBLE_EQ(best_interval(reliability), best) << save;
  }
}

TEST(Goodput, FailuresOneByOneGiveTheExpectedShare) {
  for (const int64_t ranks : {256, 4096, 100000}) {
    const auto reliability = job(ranks);
    const double best = best_interval(reliability);
    const double work = 3000 * reliability.failure_interval();
    for (const double factor : {0.5, 1.0, 2.0}) {
      const auto run = simulate_run(reliability, factor * best, work, 7);
      EXPECT_NEAR(run.goodput / goodput(reliability, factor * best), 1, 0.03) << ranks;
      EXPECT_NEAR(work + run.saving + run.lost + run.restarting, run.seconds, 1e-6 * run.seconds);
    }
  }
}

TEST(Goodput, TheSearchFindsWhatTheSimulationFinds) {
  const auto reliability = job(16384);
  const double work = 20000 * reliability.failure_interval(), best = best_interval(reliability);
  const double at_best = simulate_run(reliability, best, work, 3).goodput;
  EXPECT_GT(at_best, simulate_run(reliability, 2.5 * best, work, 3).goodput);
  EXPECT_GT(at_best, simulate_run(reliability, best / 2.5, work, 3).goodput);
}

TEST(Goodput, AJobThatNeverGetsThroughASegmentGivesUp) {
  const Reliability hopeless = {
      .ranks = 1000000, .rank_failure_interval = 3600, .save = 60, .restart = 0};
  const auto run = simulate_run(hopeless, 1000, 1000, 1);
  EXPECT_EQ(run.goodput, 0);
  EXPECT_EQ(run.done, 0);
  EXPECT_EQ(run.failures, 100000);
  EXPECT_EQ(goodput(hopeless, 1000), 0);
  EXPECT_EQ(simulate_run(job(64), 1000, 2500, 1).done, 2500);
}

TEST(Goodput, MoreCheckpointsThanCanBeSimulatedAreRefused) {
  EXPECT_THROW(simulate_run(job(2), 3.5e-5, 3600, 1), ConfigError);
  EXPECT_THROW(simulate_run(job(2), 0, 3600, 1), ConfigError);
}

}  // namespace
}  // namespace lockstep::plan
