// The lines of a Trainer's progress.
#include "lockstep/train/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

namespace lockstep::train {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Progress, TheLossIsTheMeanOfTheSamplesNotOfTheSteps) {
  std::ostringstream out;
  Progress progress(out, {.every_steps = 2});
  Requests requests;
  RunState state{.steps = 4};
  progress.on_train_begin(state);
  // 65 samples in batches of 64 make a second batch of one.
  for (const auto& [loss, samples] : {std::pair{20.0, 64}, std::pair{7.0, 1}}) {
    ++state.step;
    state.loss = loss;
    state.step_samples = samples;
    progress.on_step_end(state, requests);
  }
  EXPECT_THAT(out.str(), HasSubstr("  loss 19.80  "));
  state.step_samples = 0;  // steps that made no update
  for (int i = 0; i < 2; ++i) {
    ++state.step;
    progress.on_step_end(state, requests);
  }
  EXPECT_THAT(out.str(), HasSubstr("100 %  loss 7.000  "));
}

TEST(Progress, ALossThatWasSkippedIsNotInTheMean) {
  std::ostringstream out;
  Progress progress(out, {.every_steps = 3});
  Requests requests;
  RunState state{.steps = 6, .step_samples = 2};
  progress.on_train_begin(state);
  for (const double loss : {2.0, std::nan(""), 4.0}) {
    ++state.step;
    state.loss = loss;
    progress.on_step_end(state, requests);
  }
  EXPECT_THAT(out.str(), HasSubstr("  loss 3.000  "));
}

TEST(Progress, WhatIsLeftHasTheEvaluationsAndCheckpointsSeenSoFar) {
  std::ostringstream out;
  Progress progress(out, {.every_steps = 1});
  Requests requests;
  RunState state{.step = 10, .steps = 20, .step_samples = 1, .resumed_at = 10};
  progress.on_train_begin(state);
  state.step = 12;
  state.seconds = 20;
  state.evaluation_seconds = 12;
  state.saving_seconds = 4;
  progress.on_step_end(state, requests);
  // Two steps of this process: 4 s a line's step, 8 s of pauses a step.
  EXPECT_THAT(out.str(), HasSubstr("  1 min 36 s left"));
}

TEST(Progress, ALossThatIsNoNumberIsNaNEverywhere) {
  std::ostringstream out;
  Progress progress(out, {.every_steps = 1});
  Requests requests;
  RunState state{.step = 1, .steps = 2, .step_samples = 1, .loss = -std::nan("")};
  progress.on_train_begin(state);
  progress.on_step_end(state, requests);
  state.metrics = {{"accuracy", 0.25}, {"loss", -std::nan("")}, {"top", -INFINITY}};
  progress.on_evaluate(state, requests);
  EXPECT_THAT(out.str(), HasSubstr("  loss NaN  "));
  EXPECT_THAT(out.str(), HasSubstr("step 1:  accuracy 0.2500  loss NaN  top -inf\n"));
  EXPECT_THAT(out.str(), Not(HasSubstr("-nan")));
}

}  // namespace
}  // namespace lockstep::train
