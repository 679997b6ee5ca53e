// What a run says of its stages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "rl_policy/even_course.h"

namespace lockstep::test {
namespace {

using testing::HasSubstr;
using Json = nlohmann::ordered_json;

TEST(Results, SayWhatEachStageHasLearnt) {
  const Folder folder;
  auto o = options(folder / "run");
  o.log_all = true;
  o.drop_equal_groups = false;  // each iteration asks the reference
  o.retention_tasks = 1;
  const Left left = left_by_ranks(2, o);
  double kept = 0;
  std::istringstream lines(left.trajectories);
  for (std::string line; std::getline(lines, line);) {
    const auto episode = Json::parse(line);
    if (episode.at("phase") == "eval" && episode.at("row") == 2 && episode.at("domain") == "even" &&
        episode.at("id") == "0") {
      kept += episode.at("reward").get<double>() / 2;
    }
  }
  const auto results = Json::parse(contents(folder / "run/results.json"));
  ASSERT_EQ(results.at("stages").size(), 2U);
  for (size_t s = 0; s < 2; ++s) {
    const auto& stage = results.at("stages")[s];
    const double reward = results.at("matrix").at("R")[s + 1][s];
    EXPECT_EQ(stage.at("eval_reward"), reward);
    EXPECT_NEAR(stage.at("pass_k_rates").at("1").get<double>(), reward, 1e-12);
    EXPECT_LE(stage.at("pass_k_rates").at("2"), stage.at("pass_k_rates").at("1"));
    EXPECT_EQ(stage.at("passed"), reward >= .5);
    EXPECT_TRUE(stage.at("new_tool_success_rate").is_null());  // these tasks have no tools
    EXPECT_TRUE(stage.at("tool_performance").empty());
    for (const char* part : {"rollout", "reference", "update", "evaluation", "checkpoint"}) {
      EXPECT_GT(stage.at("seconds").at(part).get<double>(), 0) << part;
    }
  }
  EXPECT_TRUE(results.at("stages")[0].at("retention_reward").is_null());
  EXPECT_NEAR(results.at("stages")[1].at("retention_reward").get<double>(), kept, 1e-12);
  EXPECT_EQ(results.at("matrix").at("rows"), (Json{"no stage", "stage_1_even", "stage_2_again"}));
  EXPECT_EQ(results.at("matrix").at("n_tasks"), (Json{3, 3}));
  EXPECT_EQ(results.at("matrix").at("ci95").size(), 3U);
  EXPECT_GT(results.at("model").at("parameters"), 0);
  EXPECT_EQ(results.at("model").at("tokenizer_sha256").get<std::string>().size(), 64U);
  EXPECT_LE(results.at("started").get<std::string>(), results.at("ended").get<std::string>());
  const std::string report = contents(folder / "run/analysis_report.md");
  for (const char* part : {"| mean reward after | even | again |", "| stage_2_again | ",
                           "| an agent that does nothing | 0.000 | 0.000 |", "## stage_1_even",
                           "30 episodes in 2 iterations", "* On earlier domains: ", "pass^2"}) {
    EXPECT_THAT(report, HasSubstr(part));
  }
}

// Times of a stage are of all processes that have worked on it.
TEST(Results, AddTheTimesOfARunThatGoesOn) {
  const Folder folder;
  auto o = options(folder / "run");
  o.order = {"even"};
  left_by_ranks(1, o);
  const auto rollout = [&] {
    const auto results = Json::parse(contents(folder / "run/results.json"));
    return results.at("stages")[0].at("seconds").at("rollout").get<double>();
  };
  const double before = rollout();
  EXPECT_GT(before, 0);
  o.resume = true;  // there is nothing left to do
  left_by_ranks(2, o);
  EXPECT_EQ(rollout(), before);
}

}  // namespace
}  // namespace lockstep::test
