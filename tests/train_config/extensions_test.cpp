// Keys that a program declares are checked as strictly as those that are there.
#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "lockstep/train/config.h"
#include "support/thrown.h"

namespace lockstep::train {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

ConfigExtensions program() {
  return {
      .models = {{"my_net",
                  {{.name = "depth", .fallback = int64_t{2}, .least = 1},
                   {.name = "dropout", .fallback = 0.5, .least = 0, .most = 1},
                   {.name = "sizes", .fallback = std::vector<int64_t>{1}}}}},
      .losses = {"my_loss"},
      .sections = {{"rewards",
                    {{.name = "mode", .fallback = std::string("sum"), .allowed = {"sum", "mean"}},
                     {.name = "name", .fallback = std::string(), .required = true}}}}};
}

RunConfig read_mine(const std::string& text) {
  return parse_config(text, "run.yaml", {}, program());
}
std::string refusal_of_mine(const std::string& text) {
  return test::message_of<ConfigError>([&] { read_mine(text); });
}

TEST(Extensions, HaveValuesAndDefaults) {
  const auto config =
      read_mine("model: {kind: my_net, depth: 4}\nloss: my_loss\nrewards: {name: a}\n");
  EXPECT_EQ(config.extra_value<int64_t>("model.depth"), 4);
  EXPECT_EQ(config.extra_value<double>("model.dropout"), 0.5);
  EXPECT_THAT(config.extra_value<std::vector<int64_t>>("model.sizes"), ElementsAre(1));
  EXPECT_EQ(config.extra_value<std::string>("rewards.mode"), "sum");
  EXPECT_EQ(config.training.loss, "my_loss");
  EXPECT_THAT(test::message_of<ConfigError>([&] { config.extra_value<double>("model.depth"); }),
              HasSubstr("asks for model.depth"));
}

TEST(Extensions, AreChecked) {
  const std::string text = refusal_of_mine(
      "model: {kind: my_net, depht: 4, dropout: 2, hidden: [1]}\nrewards: {mode: max}\n");
  EXPECT_THAT(text, HasSubstr("1:23: unknown key 'depht' in model; the nearest is depth"));
  EXPECT_THAT(text, HasSubstr("1:42: dropout: '2' is not a number from 0 to 1"));
  EXPECT_THAT(text, HasSubstr("model.hidden belongs to model.kind mlp"));
  EXPECT_THAT(text, HasSubstr("2:17: mode: 'max' is not one of sum, mean"));
  EXPECT_THAT(text, HasSubstr("rewards.name is missing: a text"));
}

TEST(Extensions, OfOtherKindsDoNotCount) {
  EXPECT_THAT(refusal_of_mine("model: {depth: 3}\nrewards: {name: a}\n"),
              HasSubstr("model.depth belongs to model.kind my_net, and model.kind is mlp"));
}

// Of "val_loss" the highest was the best.
TEST(Extensions, AMetricWhoseNameEndsWithLossIsBetterTheLowerItIs) {
  for (const char* name : {"loss", "val_loss", "word_error", "mse", "perplexity"}) {
    EXPECT_TRUE(is_better_lower(name)) << name;
  }
  for (const char* name : {"accuracy", "loss_reduction", "error_free", "f1", ""}) {
    EXPECT_FALSE(is_better_lower(name)) << name;
  }
}

TEST(Extensions, ThatMeetOthersAreRefused) {
  const auto refused = [](const ConfigExtensions& extensions) {
    return test::message_of<ConfigError>([&] { parse_config("", "run.yaml", {}, extensions); });
  };
  EXPECT_THAT(refused({.models = {{"mlp", {}}}}), HasSubstr("there is a kind of that name"));
  EXPECT_THAT(refused({.models = {{"net", {{.name = "kind"}}}}}),
              HasSubstr("model.kind: there is a key of that name"));
  EXPECT_THAT(refused({.sections = {{"training", {}}}}), HasSubstr("there is a section or key"));
  EXPECT_THAT(refused({.sections = {{"batch_size", {}}}}), HasSubstr("there is a section or key"));
  EXPECT_THAT(refused({.sections = {{"a", {{.name = "B c"}}}}}), HasSubstr("not a word"));
  EXPECT_THAT(refused({.sections = {{"a", {{.name = "b"}, {.name = "b"}}}}}),
              HasSubstr("a.b: there is a key of that name"));
  EXPECT_THAT(refused({.losses = {"mse"}}), HasSubstr("training.loss mse: it is there"));
  EXPECT_THAT(refused({.sections = {{"a", {{.name = "b", .fallback = 3.0, .most = 1}}}}}),
              HasSubstr("its default 3 is not a number, at most 1"));
}

TEST(Extensions, AreShown) {
  const auto config = read_mine("model: my_net\nrewards: {name: a}\n");
  const std::string shown = show_config(config, program());
  EXPECT_THAT(shown, HasSubstr("  sizes: [1]"));
  EXPECT_THAT(shown, HasSubstr("rewards:\n"));
  EXPECT_EQ(read_mine(shown).extra, config.extra);
}

}  // namespace
}  // namespace lockstep::train
