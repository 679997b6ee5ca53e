// Keys that another one decides about: said where they were given, left out where they are shown.
#include <gmock/gmock.h>

#include <string>

#include "lockstep/train/config_texts.h"
#include "train_config/read.h"

namespace lockstep::train {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

TEST(ReplacedKeys, MomentumThatOneCycleMovesIsSaid) {
  const auto config = read("optimizer: {kind: sgd, momentum: 0.5}\nschedule: one_cycle");
  EXPECT_TRUE(moves_momentum(config));
  EXPECT_THAT(
      config.remarks,
      ElementsAre("run.yaml:1:24: optimizer.momentum has no effect: schedule.kind one_cycle "
                  "moves it; schedule.cycle_momentum: false keeps it"));
  EXPECT_THAT(read("optimizer: {kind: adamw, beta1: 0.5}\nschedule: one_cycle").remarks,
              ElementsAre(HasSubstr("run.yaml:1:26: optimizer.beta1 has no effect")));
  const auto kept = read(
      "optimizer: {kind: sgd, momentum: 0.5}\nschedule: {kind: one_cycle, cycle_momentum: no}");
  EXPECT_FALSE(moves_momentum(kept));
  EXPECT_THAT(kept.remarks, IsEmpty());
  EXPECT_THAT(refusal("schedule: {kind: cosine, cycle_momentum: false}"),
              HasSubstr("schedule.cycle_momentum belongs to schedule.kind one_cycle"));
}

TEST(ReplacedKeys, EpochsWithStepsAreSaid) {
  const auto config = read("training: {epochs: 3, max_steps: 10}");
  EXPECT_THAT(
      config.remarks,
      ElementsAre("run.yaml:1:12: training.epochs has no effect: training.max_steps 10 ends "
                  "the training"));
  EXPECT_THAT(show_config(config), HasSubstr("  epochs: 3"));
  EXPECT_THAT(read("training: {epochs: 3, max_steps: 0}").remarks, IsEmpty());
}

// As the run's config.yaml is.
TEST(ReplacedKeys, WhatIsShownIsReadBackWithoutARemark) {
  for (const std::string text :
       {"model: {kind: transformer, pretrained: net}\ndata: {kind: tokens, path: t}",
        "optimizer: sgd\nschedule: one_cycle", "schedule: one_cycle",
        "training: {max_steps: 10}"}) {
    const auto config = read(text);
    const auto again = read(show_config(config));
    EXPECT_THAT(again.remarks, IsEmpty()) << text;
    EXPECT_EQ(config_texts(again), config_texts(config)) << text;
  }
  EXPECT_THAT(show_config(read("model: {kind: transformer, pretrained: net}\n"
                               "data: {kind: tokens, path: t}")),
              Not(HasSubstr("layers")));
  EXPECT_THAT(refusal("model: {kind: transformer, pretrained: net, heads: 4}\n"
                      "data: {kind: tokens, path: t}"),
              HasSubstr("model.heads: model.pretrained gives the sizes: leave it out"));
}

}  // namespace
}  // namespace lockstep::train
