// Plans of models of which a part is trained: adapters beside frozen weights, or a new head.
#include <gmock/gmock.h>

#include "lockstep/plan/plan.h"
#include "lockstep/plan/simulate.h"

namespace lockstep::plan {
namespace {

using testing::HasSubstr;

const Training kTraining = {.batch = 4, .precision = Precision::Narrow};

Machine cluster() {
  return {.device = device_named("h100-sxm"), .network = network_named("8x400g")};
}

// Everything is frozen, with an adapter of this many elements in each block.
ModelProfile with_adapters(int64_t elements) {
  auto model = transformer_profile(model_named("qwen3-4b"), 2048, Precision::Narrow);
  bool is_reached = false;
  for (auto& unit : model.units) {
    unit.frozen = unit.trained();
    unit.parameters.clear();
    if (unit.is_block && elements > 0) unit.parameters = {elements, elements};
    is_reached = is_reached || unit.is_block;
    unit.has_backward = is_reached && elements > 0;
  }
  return model;
}

// Everything is frozen but the last unit.
ModelProfile with_a_head() {
  auto model = with_adapters(0);
  auto& head = model.units.back();
  head.parameters = {head.frozen};
  head.frozen = 0;
  head.has_backward = true;
  return model;
}

TEST(PlanFrozen, HaveNeitherGradientsNorAnOptimizersState) {
  const auto whole = transformer_profile(model_named("qwen3-4b"), 2048, Precision::Narrow);
  const auto model = with_adapters(100'000);
  const auto trained = static_cast<double>(model.trained());
  EXPECT_EQ(model.trained(), 36 * 200'000);
  EXPECT_EQ(model.elements(), whole.elements() + model.trained());
  for (const auto strategy : {Strategy::Ddp, Strategy::Zero}) {
    const auto memory = memory_of(model, kTraining, strategy, cluster(), 16);
    EXPECT_DOUBLE_EQ(memory.gradients, 4 * trained);
    EXPECT_DOUBLE_EQ(memory.optimizer, 8 * trained / (strategy == Strategy::Zero ? 16 : 1));
    EXPECT_GT(memory.parameters, 4 * static_cast<double>(whole.elements()));
  }
  const auto full = memory_of(model, kTraining, Strategy::FsdpFull, cluster(), 16);
  EXPECT_DOUBLE_EQ(full.gradients, 4 * trained / 16);
  EXPECT_DOUBLE_EQ(full.parameters, 4 * static_cast<double>(model.elements()) / 16);
  EXPECT_GE(full.gathered, memory_of(whole, kTraining, Strategy::FsdpFull, cluster(), 16).gathered);
  EXPECT_THAT(plan_text(make_plan(model, kTraining, cluster(), {.ranks = 16})),
              HasSubstr("4.03 G parameters, 7.2 M of them trained;"));
}

TEST(PlanFrozen, AreNeitherSentNorUpdatedAndTakeHalfABackward) {
  const auto whole = transformer_profile(model_named("qwen3-4b"), 2048, Precision::Narrow);
  const auto model = with_adapters(100'000);
  for (const auto strategy : {Strategy::Ddp, Strategy::FsdpFull, Strategy::FsdpGradients}) {
    const auto before = work_of(whole, kTraining, strategy, cluster(), 16);
    const auto after = work_of(model, kTraining, strategy, cluster(), 16);
    EXPECT_NEAR(after.computation / before.computation, 2.0 / 3, 0.02);
    EXPECT_LT(after.update, before.update / 100);
    EXPECT_LT(after.collectives + after.exposed, before.collectives + before.exposed);
  }
}

TEST(PlanFrozen, UnitsBeforeAllThatIsTrainedHaveNoBackward) {
  const auto whole = transformer_profile(model_named("qwen3-4b"), 2048, Precision::Narrow);
  const auto model = with_a_head();
  const auto time = [](const ModelProfile& of, Strategy strategy) {
    return time_of(of, kTraining, strategy, cluster(), 16);
  };
  const double head = model.units.back().flops / model.forward_flops();
  EXPECT_NEAR(time(model, Strategy::Ddp).computation / time(whole, Strategy::Ddp).computation,
              head + (1 - head) / 3, 0.02);
  // They keep nothing, nor do their weights' narrow copies stay.
  const auto memory = [](const ModelProfile& of) {
    return memory_of(of, kTraining, Strategy::Ddp, cluster(), 16);
  };
  EXPECT_LT(memory(model).activations, memory(whole).activations / 10);
  EXPECT_DOUBLE_EQ(memory(model).parameters, 4 * static_cast<double>(model.elements()) +
                                                 2 * static_cast<double>(model.trained()));
  // What is not computed again is not gathered again.
  const auto full = work_of(model, kTraining, Strategy::FsdpFull, cluster(), 16);
  const auto kept = work_of(model, kTraining, Strategy::FsdpGradients, cluster(), 16);
  EXPECT_DOUBLE_EQ(full.collectives + full.exposed, kept.collectives + kept.exposed);
  // The simulator agrees.
  for (const auto strategy : {Strategy::Ddp, Strategy::FsdpFull}) {
    const auto played = simulate(model, kTraining, strategy, cluster(), 16, {.steps = 1});
    EXPECT_NEAR(played.steps.front() / time(model, strategy).total, 1, 0.1) << name_of(strategy);
  }
}

// A model that learns from one of the same size, whose units come last and have no backward.
TEST(PlanFrozen, UnitsAfterThoseThatAreTrainedAreLeftOutOfTheBackwardAlone) {
  auto model = transformer_profile(model_named("qwen3-4b"), 2048, Precision::Narrow);
  const auto teacher = with_adapters(0).units;
  model.units.insert(model.units.end(), teacher.begin(), teacher.end());
  for (const auto strategy : {Strategy::Ddp, Strategy::FsdpFull}) {
    const auto played = simulate(model, kTraining, strategy, cluster(), 16, {.steps = 1});
    const double planned = time_of(model, kTraining, strategy, cluster(), 16).total;
    EXPECT_NEAR(played.steps.front() / planned, 1, 0.1) << name_of(strategy);
  }
}

}  // namespace
}  // namespace lockstep::plan
