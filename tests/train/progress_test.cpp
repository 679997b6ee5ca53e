// What a run prints while it goes on.
#include "lockstep/train/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

namespace lockstep {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using train::RunState;

TEST(Progress, ALineThatIsWrittenOverHasTheLastLossesAndNothingOfTheOneBefore) {
  std::ostringstream out;
  train::Progress progress(out, {.every_steps = 2, .updating = true, .width = 60});
  train::Requests requests;
  RunState state{.steps = 4, .step_samples = 10};
  progress.on_train_begin(state);
  const auto written = [&](int64_t step, double loss) {
    state.step = step;
    state.loss = loss;
    state.learning_rate = step == 1 ? 0.123 : 1;
    out.str("");
    progress.on_step_end(state, requests);
    return out.str();
  };
  const std::string first = written(1, 1e6);
  EXPECT_THAT(first, testing::StartsWith("epoch 1  step 1/4  25 %  loss 1000000.0000  lr 0.123"));
  EXPECT_EQ(first.size(), 59 + 1) << first;
  state.metrics = {{"a", 1}};
  out.str("");
  progress.on_evaluate(state, requests);
  EXPECT_EQ(out.str().size(), 59 + 1);
  written(2, 1e6);
  written(3, 1);
  EXPECT_THAT(written(4, 3), AllOf(HasSubstr("loss 2.0000"), testing::EndsWith("\n")));
}

TEST(Progress, ALineThatIsWrittenOverIsEndedWithTheRun) {
  std::ostringstream out;
  train::Progress progress(out, {.updating = true});
  train::Requests requests;
  RunState state{.step = 1, .step_samples = 10, .loss = 2};  // nobody knows how many steps
  progress.on_train_begin(state);
  progress.on_step_end(state, requests);
  EXPECT_THAT(out.str(), testing::EndsWith("\r"));
  progress.on_train_end(state);
  EXPECT_THAT(out.str(), testing::EndsWith("\r\n"));
}

TEST(Progress, NeedsNoTrainer) {
  std::ostringstream out;
  train::Progress progress(out, {.every_steps = 2});
  train::Requests requests;
  RunState state{.epochs = 2, .steps = 8, .step_samples = 10, .learning_rate = 0.5};
  progress.on_train_begin(state);
  for (int64_t step = 1; step <= 3; ++step) {
    state.step = step;
    state.loss = static_cast<double>(step);
    state.seconds = static_cast<double>(step);
    progress.on_step_end(state, requests);
  }
  EXPECT_EQ(out.str(),
            "epoch 1/2  step 2/8  25 %  loss 1.5000  lr 0.5  10 samples/s  6.0 s left\n");
  state.metrics = {{"accuracy", 0.25}};
  progress.on_evaluate(state, requests);
  EXPECT_THAT(out.str(), HasSubstr("evaluated after step 3:  accuracy 0.2500\n"));
  state.rank = 1;
  const auto before = out.str();
  progress.on_evaluate(state, requests);
  EXPECT_EQ(out.str(), before);
}

}  // namespace
}  // namespace lockstep
