// Each trouble that the reports of a run show is named once, with a rank and a cure.
#include "lockstep/train/run_warnings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace lockstep::train {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kOneMiB = int64_t{1} << 20;

// Four ranks that compute for 10 ms a step, and wait 2 ms for each other.
StepReport healthy(int64_t number) {
  StepReport report{.step = 10 * number,
                    .steps = 10,
                    .seconds = static_cast<double>(number),
                    .loss = 2.0 - 0.01 * static_cast<double>(number),
                    .gradient_norm = 1.0};
  report.ranks.assign(4, {.step_seconds = 0.012,
                          .communication_seconds = 0.002,
                          .data_seconds = 0.0005,
                          .memory_bytes = 500 * kOneMiB});
  return report;
}

// What is said of reports 1 to `count`, each changed by `change`.
template <class Change>
std::vector<Event> said(int64_t count, const Change& change) {
  RunWarnings warnings;
  std::vector<Event> all;
  for (int64_t number = 1; number <= count; ++number) {
    StepReport report = healthy(number);
    change(report, number);
    for (auto& event : warnings.look(report)) all.push_back(std::move(event));
  }
  return all;
}

TEST(RunWarnings, NothingIsSaidOfAGoodRun) {
  EXPECT_TRUE(said(1000, [](StepReport&, int64_t) {}).empty());
}

TEST(RunWarnings, AStragglerIsNamedWithWhereItIsSlow) {
  const auto events = said(10, [](StepReport& report, int64_t) {
    for (auto& rank : report.ranks) rank.step_seconds = 0.017;
    for (auto& rank : report.ranks) rank.communication_seconds = 0.007;
    report.ranks[2].communication_seconds = 0.002;  // works 15 ms, the others 10
  });
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, "warning");
  EXPECT_EQ(events[0].rank, 2);
  EXPECT_EQ(events[0].step, 20) << "one slow report may be chance";
  EXPECT_THAT(events[0].text,
              HasSubstr("rank 2 works 15.0 ms a step, the others 10.0 ms (1.50 times): "
                        "it computes for longer, and all wait for it"));
  EXPECT_THAT(events[0].advice, HasSubstr("--bind cores"));
}

TEST(RunWarnings, IdleGpusAreNamedWithWhatToDo) {
  const auto idle = [](StepReport& report, int64_t) {
    for (auto& rank : report.ranks) rank.gpu_busy = 0.25;
    report.ranks[1].gpu_busy = -1;  // not known
  };
  const auto events = said(10, idle);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].step, 20) << "one idle moment may be chance";
  EXPECT_EQ(events[0].text, "the GPUs compute only 25 % of the time");
  EXPECT_THAT(events[0].advice, HasSubstr("training.batch_size"));
  const auto waiting = said(10, [&](StepReport& report, int64_t number) {
    idle(report, number);
    for (auto& rank : report.ranks) rank.communication_seconds = 0.006;
  });
  ASSERT_EQ(waiting.size(), 1u);
  EXPECT_THAT(waiting[0].text, HasSubstr("the ranks wait for each other 50 % of it"));
  EXPECT_THAT(waiting[0].advice, HasSubstr("parallel.hook"));
}

TEST(RunWarnings, GpusThatWaitForDataAreNotWarnedOfTwice) {
  const auto events = said(10, [](StepReport& report, int64_t) {
    for (auto& rank : report.ranks) rank.gpu_busy = 0.1, rank.data_seconds = 0.006;
  });
  ASSERT_EQ(events.size(), 1u);
  EXPECT_THAT(events[0].text, HasSubstr("training waits for data"));
}

TEST(RunWarnings, GpusAreFineThatComputeOrAreIdleOnce) {
  EXPECT_TRUE(said(100, [](StepReport& report, int64_t number) {
                for (auto& rank : report.ranks) rank.gpu_busy = number % 2 == 0 ? 0.1 : 0.9;
              }).empty());
}

TEST(RunWarnings, AStragglerThatWaitsForItsDiskIsToldFromOneThatComputes) {
  const auto events = said(3, [](StepReport& report, int64_t) {
    for (auto& rank : report.ranks) rank.step_seconds = 0.017, rank.communication_seconds = 0.007;
    report.ranks[0].communication_seconds = 0.002;
    report.ranks[0].data_seconds = 0.0055;
  });
  ASSERT_EQ(events.size(), 1u);
  EXPECT_THAT(events[0].text, HasSubstr("it waits for data for longer"));
}

// A file of lockstep train has a key for that, three_domain a flag.
TEST(RunWarnings, AStragglerThatSavesIsToldWhatTheProgramHas) {
  const auto events = said(3, [](StepReport& report, int64_t) {
    for (auto& rank : report.ranks) rank.step_seconds = 0.017, rank.communication_seconds = 0.007;
    report.ranks[0].communication_seconds = 0.002;
    report.ranks[0].checkpoint_seconds = 0.0055;
  });
  ASSERT_EQ(events.size(), 1u);
  EXPECT_THAT(events[0].text, HasSubstr("it saves for longer"));
  EXPECT_THAT(events[0].advice, HasSubstr("checkpoint.async"));
  EXPECT_THAT(events[0].advice, HasSubstr("in three_domain, less often (--save-every)"));
}

TEST(RunWarnings, LessThanTwoMillisecondsAStepAreNoStraggler) {
  const auto of_short_steps = [](double longer) {
    return said(10, [&](StepReport& report, int64_t) {
      for (auto& rank : report.ranks) rank = {.step_seconds = 0.0012};
      report.ranks[1].step_seconds += longer;
    });
  };
  EXPECT_TRUE(of_short_steps(0.0003).empty());
  EXPECT_TRUE(of_short_steps(0.0019).empty());
  EXPECT_EQ(of_short_steps(0.0021).size(), 1U);
}

TEST(RunWarnings, OneSlowReportIsNoStraggler) {
  const auto events = said(20, [](StepReport& report, int64_t number) {
    if (number % 2 == 0) report.ranks[static_cast<size_t>(number) % 4].step_seconds = 0.05;
  });
  EXPECT_TRUE(events.empty());
}

TEST(RunWarnings, TheSameTroubleIsNamedOnceAMinute) {
  const auto events = said(150, [](StepReport& report, int64_t) {
    for (auto& rank : report.ranks) rank.data_seconds = 0.006;
  });
  ASSERT_EQ(events.size(), 3u);
  EXPECT_THAT(events[0].text, HasSubstr("training waits for data 50 % of the time"));
  EXPECT_THAT(events[0].advice, HasSubstr("workers"));
  EXPECT_EQ(events[1].seconds - events[0].seconds, 60);
}

TEST(RunWarnings, MemoryImbalanceNamesTheRankThatHasMore) {
  const auto events =
      said(3, [](StepReport& report, int64_t) { report.ranks[1].memory_bytes = 2000 * kOneMiB; });
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].text, "rank 1 has 2.1 GB of memory, the others 524.3 MB");
  EXPECT_EQ(events[0].rank, 1);
}

TEST(RunWarnings, ARankThatLeaksIsNamedAndOneThatStopsGrowingIsNot) {
  const auto events = said(12, [](StepReport& report, int64_t number) {
    report.ranks[3].memory_bytes = (500 + 20 * number) * kOneMiB;
    report.ranks[0].memory_bytes = (number < 4 ? 400 : 560) * kOneMiB;
  });
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].rank, 3);
  EXPECT_THAT(events[0].text, HasSubstr("rank 3's memory grows: "));
  EXPECT_THAT(events[0].advice, HasSubstr("item() or detach()"));
}

TEST(RunWarnings, ALossThatExplodesIsNamed) {
  const auto events = said(30, [](StepReport& report, int64_t number) {
    if (number >= 25) report.loss = 50.0;
  });
  ASSERT_EQ(events.size(), 1u);
  EXPECT_THAT(events[0].text,
              HasSubstr("the loss has exploded: 50 at step 250, after 1.76 at best"));
  EXPECT_THAT(events[0].advice, HasSubstr("learning rate"));
}

TEST(RunWarnings, ALossThatFluctuatesIsNot) {
  EXPECT_TRUE(said(200, [](StepReport& report, int64_t number) {
                report.loss = 1.0 + (number % 7 == 0 ? 1.5 : 0.0);
              }).empty());
}

TEST(RunWarnings, OneBadBatchHasNotExploded) {
  EXPECT_TRUE(said(30, [](StepReport& report, int64_t number) {
                report.mean_loss = 1.0 + 0.5 / static_cast<double>(number);
                report.loss = number == 25 ? 50.0 : 1.0;
              }).empty());
}

TEST(RunWarnings, ALossAroundZeroHasNotExploded) {
  EXPECT_TRUE(said(200, [](StepReport& report, int64_t number) {
                constexpr double kNoise[] = {0.02, -0.3, 0.9, 0.1, -0.7, 0.6, -0.01};
                report.loss = number < 5 ? 0.0 : kNoise[number % 7] / 4;
              }).empty());
  const auto events = said(30, [](StepReport& report, int64_t number) {
    report.loss = number < 25 ? 0.01 * static_cast<double>(number % 3 - 1) : 2.0;
  });
  ASSERT_EQ(events.size(), 1u);
  EXPECT_THAT(events[0].text, HasSubstr("the loss has exploded: 2 at step 250"));
}

TEST(RunWarnings, ASmallLossThatExplodesIsNamed) {
  const auto events = said(30, [](StepReport& report, int64_t number) {
    report.loss = number < 25 ? 0.001 + 0.00001 * static_cast<double>(number % 3) : 0.25;
  });
  ASSERT_EQ(events.size(), 1u);
  EXPECT_THAT(events[0].text, HasSubstr("the loss has exploded: 0.25 at step 250, after 0.001"));
}

TEST(RunWarnings, ANaNIsNamedWithTheFirstParameter) {
  RunWarnings warnings;
  StepReport report = healthy(1);
  report.loss = std::nan("");
  const auto events = warnings.look(report, "fc1.weight");
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].text, "the loss is NaN at step 10; the first parameter is fc1.weight");
  report = healthy(2);
  EXPECT_TRUE(warnings.look(report, "fc1.weight").empty()) << "the same trouble";
}

TEST(RunWarnings, AGradientThatIsNotFiniteIsNamed) {
  const auto events = said(3, [](StepReport& report, int64_t) {
    report.gradient_norm = std::numeric_limits<double>::infinity();
  });
  ASSERT_EQ(events.size(), 1u);
  EXPECT_THAT(events[0].text, HasSubstr("a gradient is not finite at step 10"));
}

TEST(RunWarnings, AGradientThatIsNotFiniteSilencesNoLossThatIsNot) {
  const auto events = said(2, [](StepReport& report, int64_t number) {
    if (number == 1) report.gradient_norm = std::numeric_limits<double>::infinity();
    if (number == 2) report.loss = std::nan("");
  });
  ASSERT_EQ(events.size(), 2u);
  EXPECT_THAT(events[0].text, HasSubstr("a gradient is not finite at step 10"));
  EXPECT_THAT(events[1].text, HasSubstr("the loss is NaN at step 20"));
}

TEST(RunWarnings, AGradientNormThatJumpsIsNamed) {
  const auto events = said(20, [](StepReport& report, int64_t number) {
    if (number == 15) report.gradient_norm = 500;
  });
  ASSERT_EQ(events.size(), 1u);
  EXPECT_THAT(events[0].text, HasSubstr("the gradient norm has jumped to 500 at step 150, from 1"));
}

TEST(RunWarnings, ReportsWithoutRanksOrLossAreLookedAt) {
  RunWarnings warnings;
  EXPECT_TRUE(warnings.look({}).empty());
  StepReport one;
  one.ranks.resize(1);
  EXPECT_TRUE(warnings.look(one).empty());
}

}  // namespace
}  // namespace lockstep::train
