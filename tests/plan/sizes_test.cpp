// Sizes of models and batches for which 64 bits have no room.
#include "plan/sizes.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <limits>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/plan/plan.h"

namespace lockstep::plan {
namespace {

using testing::HasSubstr;

// What 64 bits do not count is refused: it had come out as a model of -2.45e18 parameters, which
// fitted any device.
TEST(Sizes, WhatNoModelHasIsRefused) {
  const auto refusal = [](const train::ModelConfig& model) -> std::string {
    try {
      return fmt::format("{} elements", profile_of({.model = model}, {{784}, 10}).elements());
    } catch (const ConfigError& error) {
      return error.what();
    }
  };
  const int64_t wide = 4'000'000'000, most = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(refusal({.kind = "mlp", .mlp = {.hidden = {wide, wide}}}),
            "[plan] 4000000000 x 4000000000 elements are more than the 1000000000000000 of the "
            "largest model");
  EXPECT_THAT(refusal({.kind = "linear", .linear = {.inputs = most, .outputs = 2}}),
              HasSubstr("9223372036854775807 x 2 elements are more than"));
  const auto transformer = [](int64_t vocabulary, int64_t layers, int64_t hidden) {
    return train::ModelConfig{.kind = "transformer",
                              .transformer = {.vocabulary = vocabulary,
                                              .layers = layers,
                                              .hidden = hidden,
                                              .heads = 5,
                                              .max_length = 1024}};
  };
  EXPECT_THAT(refusal(transformer(100, 2, 5'000'000'000)), HasSubstr("are more than"));
  EXPECT_THAT(refusal(transformer(most, 2, 320)), HasSubstr("9223372036854775807 x 320 elements"));
  EXPECT_THAT(refusal(transformer(100, most, 320)),
              HasSubstr("model.layers 9223372036854775807: give at most 1000000"));
  EXPECT_THAT(refusal(transformer(100, 1'000'000, 100'000)), HasSubstr("1000000 x "));
  EXPECT_EQ(refusal({.kind = "mlp", .mlp = {.hidden = {1'000'000, 1'000'000}}}),
            "1000796000010 elements");
}

// As the model does when it gets them.
TEST(Sizes, ImagesThatTheStagesHalveToNothingAreRefused) {
  const auto elements = [](int64_t size) {
    train::RunConfig config;
    config.model = {.kind = "convnet", .convnet = {.channels = {8, 8, 8, 8}}};
    return profile_of(config, {{1, size, size}, 10}).elements();
  };
  EXPECT_GT(elements(16), 0);
  EXPECT_THROW(elements(15), ConfigError);
}

TEST(Sizes, RatesOfTheLargestBatchesAreCounted) {
  const Machine machine = {.device = device_named("h100-sxm"), .network = network_named("8x400g")};
  const auto rate = [&](int64_t batch, int64_t accumulation, int64_t lanes = 0) {
    const Training training = {.batch = batch, .accumulation = accumulation, .lanes = lanes};
    const auto plan = make_plan(profile_of({.model = {.kind = "linear"}}, {{784}, 10}), training,
                                machine, {.ranks = lanes > 0 ? 1 : 1'000'000});
    return plan.strategies.front().samples_per_second;
  };
  EXPECT_GT(rate(1'000'000'000, 1'000'000'000), 0);
  EXPECT_GT(rate(1'000'000'000, 1'000'000'000, 1'000'000'000), 0);
  EXPECT_THROW(rate(1'000'000'001, 1), ConfigError);
  EXPECT_THROW(rate(1, 1'000'000'001), ConfigError);
  EXPECT_THROW(rate(1, 1, 1'000'000'001), ConfigError);
}

}  // namespace
}  // namespace lockstep::plan
