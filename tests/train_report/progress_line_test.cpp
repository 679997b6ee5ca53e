// What a terminal shows of a run.
#include "lockstep/train/progress_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <sstream>
#include <string>

namespace lockstep::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

StepReport a_step() {
  StepReport made{.step = 400,
                  .steps = 50,
                  .epoch = 1,
                  .loss = 0.31214,
                  .learning_rate = 1e-3,
                  .gradient_norm = 1.25,
                  .samples_per_second = 12345.6};
  made.ranks.assign(3,
                    {.step_seconds = 0.02, .communication_seconds = 0.01, .memory_bytes = 1 << 30});
  return made;
}

TEST(ProgressLine, SaysHowFarHowFastAndHowLong) {
  EXPECT_EQ(progress_line(a_step(), {.steps = 938}, {.width = 0}),
            "epoch 2  step 400/938  42 %  loss 0.3121  lr 0.001  norm 1.25  12,346 samples/s  "
            "10 s left");
  EXPECT_EQ(progress_line(a_step(), {}, {.width = 0}),
            "epoch 2  step 400  loss 0.3121  lr 0.001  norm 1.25  12,346 samples/s");
  EXPECT_EQ(progress_line({.step = 1, .loss = 0.5, .samples_per_second = 0.25},
                          {.steps = 2, .epochs = 3, .stage = "one", .step_seconds = 90}),
            "stage one  epoch 1/3  step 1/2  50 %  loss 0.5000  0.25 samples/s  1 min 30 s left");
}

TEST(ProgressLine, TheLossIsTheMeanSinceTheLineBefore) {
  StepReport mean = a_step();
  mean.mean_loss = 0.4;
  EXPECT_THAT(progress_line(mean), HasSubstr("  loss 0.4000  "));
}

TEST(ProgressLine, WhatIsLeftHasEvaluationsAndCheckpointsInIt) {
  EXPECT_THAT(progress_line(a_step(), {.steps = 500, .step_seconds = 0.1, .pause_seconds = 0.2}),
              HasSubstr("  30 s left"));
}

TEST(ProgressLine, AtTheEndNothingIsLeft) {
  EXPECT_THAT(progress_line(a_step(), {.steps = 400, .step_seconds = 1}), Not(HasSubstr("left")));
}

TEST(ProgressLine, EndsWithWhatTheProgramTells) {
  StepReport own = a_step();
  own.values = {{"generator", 0.5}, {"\x1b[2J", 1}};
  EXPECT_THAT(progress_line(own, {.steps = 938}, {.width = 0}),
              HasSubstr("10 s left   [2J 1  generator 0.5"));
}

TEST(ProgressLine, NamesTheSlowestRankWhereOneIsSlow) {
  StepReport slow = a_step();
  slow.ranks[1].communication_seconds = 0.005;
  EXPECT_THAT(progress_line(slow, {.steps = 938}, {.width = 0}),
              HasSubstr("10 s left  slowest: rank 1 (1.5x)"));
}

TEST(ProgressLine, FitsTheWidthByLeavingOutWhatMattersLeast) {
  StepReport full = a_step();
  full.values = {{"own", 1}};
  full.ranks[1].communication_seconds = 0.005;
  for (int width = 20; width <= 200; ++width) {
    const std::string line = progress_line(full, {.steps = 938}, {.width = width});
    EXPECT_LT(line.size(), static_cast<size_t>(width));
    EXPECT_THAT(line, HasSubstr("step 400/938"));
  }
  EXPECT_EQ(progress_line(full, {.steps = 938}, {.width = 40}),
            "step 400/938  loss 0.3121  10 s left");
  EXPECT_EQ(progress_line(full, {.steps = 938}, {.width = 71}),
            "epoch 2  step 400/938  42 %  loss 0.3121  12,346 samples/s  10 s left");
  EXPECT_EQ(progress_line(full, {.steps = 938}, {.width = 84}),
            "step 400/938  loss 0.3121  12,346 samples/s  10 s left  slowest: rank 1 (1.5x)");
}

TEST(ProgressLine, ColourIsOnlyWhereItIsAskedFor) {
  EXPECT_THAT(progress_line(a_step(), {.steps = 938}), Not(HasSubstr("\x1b")));
  EXPECT_THAT(progress_line(a_step(), {.steps = 938}, {.color = true}), HasSubstr("\x1b[1mstep"));
  StepReport broken = a_step();
  broken.loss = std::nan("");
  EXPECT_THAT(progress_line(broken, {.steps = 938}, {.color = true}),
              HasSubstr("\x1b[31mloss NaN\x1b[0m"));
}

TEST(ProgressLine, AFileIsNoTerminal) {
  const TextStyle style = TextStyle::of_file(-1);
  EXPECT_FALSE(style.color);
  EXPECT_EQ(style.width, 0);
}

TEST(ProgressLine, APipeToTheLauncherIsAsWideAsItsTerminal) {
  std::array<int, 2> ends{};
  ASSERT_EQ(pipe(ends.data()), 0);
  unsetenv("NO_COLOR");
  setenv("LOCKSTEP_COLUMNS", "71", 1);
  TextStyle style = TextStyle::of_file(ends[1]);
  EXPECT_EQ(style.width, 71);
  EXPECT_TRUE(style.color);
  EXPECT_TRUE(style.rewrites);
  setenv("NO_COLOR", "1", 1);
  EXPECT_FALSE(TextStyle::of_file(ends[1]).color);
  EXPECT_TRUE(TextStyle::of_file(ends[1]).rewrites) << "what may be written over is not a colour";
  unsetenv("NO_COLOR");
  unsetenv("LOCKSTEP_COLUMNS");
  style = TextStyle::of_file(ends[1]);
  EXPECT_EQ(style.width, 0);
  EXPECT_FALSE(style.color);
  EXPECT_FALSE(style.rewrites);
  close(ends[0]);
  close(ends[1]);
}

TEST(ProgressLine, AWarningIsBrokenBetweenWordsAndHasNoCommandsToTheTerminal) {
  const Event event{.kind = "warning",
                    .text = "rank 1\x1b[2J is\nslow\xC2\x9B",
                    .advice = std::string(20, 'a') + " " + std::string(20, 'b')};
  EXPECT_EQ(warning_text(event, {.width = 40}), "warning: rank 1 [2J is slow  .\n         " +
                                                    std::string(20, 'a') + "\n         " +
                                                    std::string(20, 'b'));
}

TEST(RunScreen, ALongWarningFitsTheWidth) {
  RunHistory run;
  run.path = "runs/a/metrics.jsonl";
  run.add(RunStart{.ranks = 1}, 1);
  std::string words;
  for (int i = 0; i < 200; ++i) words += "words ";
  run.add(Event{.kind = "warning", .step = 1234567, .text = words}, 2);
  std::istringstream lines(run_screen(run, {.width = 60}));
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) EXPECT_LT(line.size(), 60u) << line;
  EXPECT_GT(count, 5);
  EXPECT_LT(count, 12);
}

TEST(RunScreen, ShowsEachRankAndTheLastWarning) {
  RunHistory run;
  run.path = "runs/a/metrics.jsonl";
  run.add(RunStart{.ranks = 3, .name = "net", .total_steps = 938}, 1);
  StepReport slow = a_step();
  slow.ranks[1].communication_seconds = 0;
  run.add(slow, 2);
  run.add(Event{.kind = "warning", .step = 400, .rank = 1, .text = "rank 1 is slow"}, 3);
  const std::string screen = run_screen(run, {.width = 80});
  EXPECT_THAT(screen, HasSubstr("a: net"));
  EXPECT_THAT(screen, HasSubstr("step 400/938"));
  EXPECT_THAT(
      screen,
      HasSubstr("1               20 ms   2.00x     1.1 GB  [##############################]"));
  EXPECT_THAT(screen, HasSubstr("[###############===============]"));
  EXPECT_THAT(screen, HasSubstr("last warning (step 400): rank 1 is slow"));
}

// A run that reports every 10 s until 1050.
RunHistory quiet_run() {
  RunHistory run;
  run.path = "runs/a/metrics.jsonl";
  run.add(RunStart{.ranks = 1, .total_steps = 100}, 1000);
  for (int64_t i = 1; i <= 5; ++i) {
    run.add(StepReport{.step = 10 * i, .steps = 10, .seconds = 10.0 * static_cast<double>(i)},
            1000 + 10 * static_cast<double>(i));
  }
  return run;
}

TEST(RunScreen, ALogThatHasBecomeSilentIsNotLive) {
  RunHistory run = quiet_run();
  const auto screen = [&](double now) { return run_screen(run, {.width = 200}, 40, now); };
  EXPECT_THAT(screen(1080), Not(HasSubstr("nothing new"))) << "an evaluation may take so long";
  EXPECT_THAT(screen(1000), Not(HasSubstr("nothing new"))) << "a clock that is behind";
  EXPECT_THAT(run_screen(run, {.width = 200}), Not(HasSubstr("nothing new")));
  EXPECT_THAT(screen(1050 + 3700),
              HasSubstr("nothing new for 1 h 1 min (before, at most 10 s from report to report): "
                        "the run was killed, or it evaluates, saves or hangs"));
  run.add(RunStart{.resumed_at = 40}, 2000);
  EXPECT_THAT(screen(2050), Not(HasSubstr("nothing new"))) << "a first step may take long";
  EXPECT_THAT(screen(2100), HasSubstr("nothing new for 1 min 40 s: the run"));
  run.add(RunEnd{.step = 40}, 2110);
  EXPECT_THAT(screen(9999), Not(HasSubstr("nothing new")));
}

TEST(RunScreen, WhatIsLeftIsByTheWholeTimeSoFar) {
  RunHistory run = quiet_run();
  StepReport fast{.step = 60, .steps = 10, .seconds = 60};
  fast.ranks.assign(1, {.step_seconds = 0.001});  // no evaluation among these steps
  run.add(fast, 1060);
  EXPECT_THAT(run_screen(run, {.width = 200}), HasSubstr("  40 s left"));
}

TEST(RunScreen, OfManyRanksTheSlowestFitTheScreen) {
  RunHistory run;
  run.add(RunStart{.ranks = 200}, 1);
  StepReport wide{.step = 1};
  wide.ranks.assign(200, {.step_seconds = 0.02, .communication_seconds = 0.01});
  wide.ranks[150].communication_seconds = 0;
  run.add(wide, 2);
  const std::string screen = run_screen(run, {.width = 80}, 20);
  EXPECT_LE(std::count(screen.begin(), screen.end(), '\n'), 20);
  EXPECT_THAT(screen, HasSubstr("\n150 "));
  EXPECT_THAT(screen, HasSubstr("(185 more ranks are faster)"));
  RunHistory few;
  few.add(RunStart{.ranks = 16}, 1);
  wide.ranks.resize(16);
  few.add(wide, 2);
  EXPECT_THAT(run_screen(few, {.width = 80}, 20),
              AllOf(HasSubstr("\n15 "), Not(HasSubstr("faster"))));
}

// Whatever else is shown: no line is so long that the terminal breaks it, and none scrolls.
TEST(RunScreen, FitsTheScreen) {
  RunHistory run;
  run.add(RunStart{.ranks = 20, .name = std::string(200, 'n')}, 1);
  StepReport report = a_step();
  report.ranks.assign(20, {.step_seconds = 0.02, .communication_seconds = 0.01});
  report.ranks[15].communication_seconds = 0;
  report.loss = report.mean_loss = 0.25;
  for (report.step = 1; report.step <= 9; ++report.step) run.add(report, 2);
  run.add(Event{.kind = "warning", .step = 9, .text = "rank 15 works long. Look at its host"}, 2);
  for (const int width : {20, 39, 40, 41, 54, 55, 60, 80, 200}) {
    for (const int most : {5, 12, 24}) {
      const std::string screen = run_screen(run, {.width = width}, most, 1000);
      EXPECT_LE(std::count(screen.begin(), screen.end(), '\n'), most) << screen;
      std::istringstream lines(screen);
      for (std::string line; std::getline(lines, line);) {
        const auto columns =
            std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xc0) != 0x80; });
        EXPECT_LT(columns, width) << line;
      }
      if (most == 24) {
        EXPECT_THAT(screen, AllOf(HasSubstr("\n15 "), HasSubstr("last warning")));
        EXPECT_EQ(screen.find('[') != std::string::npos, width >= 55) << screen;
      }
    }
  }
  // Colours take no column, and a long name leaves room for how the run ended.
  const auto lines_of = [&](const TextStyle& style) {
    const std::string screen = run_screen(run, style, 24, 1000);
    return std::count(screen.begin(), screen.end(), '\n');
  };
  EXPECT_EQ(lines_of({.width = 40, .color = true}), lines_of({.width = 40}));
  run.add(RunEnd{.step = 9, .failed = true}, 2);
  EXPECT_THAT(run_screen(run, {.width = 40}, 24, 1000), HasSubstr("nnn  failed\n"));
}

}  // namespace
}  // namespace lockstep::train
