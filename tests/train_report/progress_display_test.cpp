// The progress line, where it is written over and where it is not.
#include "lockstep/train/progress_display.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <sstream>
#include <string>

namespace lockstep::train {
namespace {

using namespace std::chrono_literals;

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr TextStyle kTerminal{.width = 80, .rewrites = true};

StepReport at(int64_t step, double seconds = 0, double speed = 100) {
  return {.step = step, .seconds = seconds, .mean_loss = 0.5, .samples_per_second = speed};
}

TEST(ProgressDisplay, WhereThereIsNoTerminalEachLineStays) {
  std::ostringstream out;
  ProgressDisplay display(out);
  display.show(at(1), {.steps = 3});
  display.print("evaluated");
  display.clear();
  display.show(at(2), {.steps = 3});
  display.show(at(3), {.steps = 3});
  display.finish();
  EXPECT_EQ(out.str(),
            "epoch 1  step 1/3  33 %  loss 0.5000  100 samples/s\nevaluated\n"
            "epoch 1  step 2/3  66 %  loss 0.5000  100 samples/s\n"
            "epoch 1  step 3/3  100 %  loss 0.5000  100 samples/s\n");
}

TEST(ProgressDisplay, ATerminalsLineIsWrittenOverAndTheLastOneStays) {
  // The three lines are to come within the pause between two; a busy machine may be late.
  for (auto took = 1000ms; took >= 200ms;) {
    std::ostringstream out;
    ProgressDisplay display(out, kTerminal);
    const auto begin = std::chrono::steady_clock::now();
    display.show(at(1), {.steps = 9});
    EXPECT_THAT(out.str(), StartsWith("epoch 1  step 1/9"));
    EXPECT_TRUE(out.str().ends_with("\x1b[K\r")) << "the cursor stands where the next line begins";
    // Too early: they wait, and the last one is printed in the end.
    const bool is_due = display.is_due();
    display.show(at(2), {.steps = 9});
    display.show(at(3), {.steps = 9});
    took = duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);
    if (took >= 200ms) continue;
    EXPECT_FALSE(is_due);
    EXPECT_THAT(out.str(), Not(HasSubstr("step 2/9")));
    display.finish();
    EXPECT_THAT(out.str(), Not(HasSubstr("step 2/9")));
    EXPECT_THAT(out.str(), HasSubstr("step 3/9"));
    EXPECT_TRUE(out.str().ends_with("\x1b[K\r\n"));
    const std::string before = out.str();
    display.finish();
    EXPECT_EQ(out.str(), before);
  }
}

TEST(ProgressDisplay, OtherLinesDoNotMixWithIt) {
  std::ostringstream out;
  ProgressDisplay display(out, kTerminal);
  display.show(at(1), {.steps = 9});
  display.print("evaluated");
  EXPECT_TRUE(out.str().ends_with("\r\x1b[Kevaluated\n"));
  display.print("again");
  EXPECT_TRUE(out.str().ends_with("evaluated\nagain\n"));
}

TEST(ProgressDisplay, TheLastStepIsShownAtOnceAndStays) {
  std::ostringstream out;
  ProgressDisplay display(out, kTerminal);
  display.show(at(8), {.steps = 9});
  display.show(at(9), {.steps = 9});
  display.print("evaluated");
  EXPECT_THAT(out.str(), HasSubstr("step 9/9  100 %"));
  EXPECT_TRUE(out.str().ends_with("\x1b[K\r\nevaluated\n"));
}

TEST(ProgressDisplay, SaysWhatRanksDoForWhoeverDoesNotKnow) {
  std::ostringstream out;
  ProgressDisplay display(out);
  display.note_ranks({{.step_seconds = 1}, {.step_seconds = 2}, {.step_seconds = 1}});
  display.show(at(1), {});
  EXPECT_THAT(out.str(), HasSubstr("slowest: rank 1 (2.0x)"));
}

TEST(ProgressDisplay, TheTimeLeftIsThatOfTheSlowestRank) {
  std::ostringstream out;
  ProgressDisplay display(out, kTerminal);
  StepReport report = at(1, 10);
  report.ranks = {{.step_seconds = 1}, {.step_seconds = 3}, {.step_seconds = 2}};
  display.show(report, {.steps = 11});
  EXPECT_THAT(out.str(), HasSubstr("30 s left"));
}

TEST(ProgressDisplay, SpeedDoesNotTrembleWhereTheLineIsWrittenOver) {
  std::ostringstream out;
  ProgressDisplay display(out, kTerminal);
  display.show(at(1, 10.0, 100), {.steps = 2});
  display.show(at(2, 10.2, 1000), {.steps = 2});
  // exp(-0.2 s / 3 s) of the speed before, the rest of the new one.
  EXPECT_THAT(out.str(), HasSubstr("158 samples/s"));
}

}  // namespace
}  // namespace lockstep::train
