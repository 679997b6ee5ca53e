// What a run says of its stages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "rl/run/record.h"
#include "rl/run/state.h"
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

TEST(Results, SayOfEachEpisodeAndIterationToWhichStageItBelongs) {
  const Folder folder;
  const auto o = options(folder / "run");
  std::map<std::pair<int, int>, std::vector<double>> rewards;  // by stage and iteration
  std::set<std::vector<int>> evaluations;
  std::istringstream lines(left_by_ranks(2, o).trajectories);
  for (std::string line; std::getline(lines, line);) {
    const auto episode = Json::parse(line);
    const int stage = episode.at("stage"), iteration = episode.at("iteration"),
              row = episode.at("row");
    if (episode.at("phase") == "eval") evaluations.insert({stage, iteration, row});
    if (episode.at("phase") == "eval") continue;
    EXPECT_EQ(row, stage - 1);
    rewards[{stage, iteration}].push_back(episode.at("reward"));
  }
  EXPECT_EQ(evaluations, (std::set<std::vector<int>>{{0, 0, 0}, {1, 2, 1}, {2, 2, 2}}));
  std::istringstream log(contents(folder / "run/metrics.jsonl"));
  size_t steps = 0;
  for (std::string line; std::getline(log, line);) {
    const auto step = Json::parse(line);
    if (step.at("type") != "step") continue;
    ++steps;
    for (const char* key : {"kl", "entropy", "clip_low", "clip_high", "frac_flat", "dropped",
                            "grad_norm", "lr", "length_mean", "length_max", "turns_mean"}) {
      EXPECT_TRUE(step.at(key).is_number()) << key;
    }
    const auto& all = rewards.at({step.at("stage").get<int>(), step.at("iteration").get<int>()});
    double mean = 0, squares = 0;
    for (const double one : all) mean += one / static_cast<double>(all.size());
    for (const double one : all) squares += (one - mean) * (one - mean);
    EXPECT_NEAR(step.at("reward").get<double>(), mean, 1e-12);
    EXPECT_NEAR(step.at("reward_std").get<double>(),
                std::sqrt(squares / static_cast<double>(all.size() - 1)), 1e-12);
    EXPECT_EQ(step.at("dropped").get<double>(), std::round(5 * step.at("frac_flat").get<double>()));
    EXPECT_NEAR(step.at("tokens").get<double>(), 15 * step.at("length_mean").get<double>(), 1e-9);
    EXPECT_GT(step.at("tokens_per_s"), 0);
    EXPECT_EQ(step.at("parts").size(), 3U);
    double ends = 0;
    for (const auto& [end, count] : step.at("end").items()) ends += count.get<double>();
    EXPECT_EQ(ends, 15);
    for (const double seconds : step.at("per_rank").at("rollout_s")) EXPECT_GT(seconds, 0);
    EXPECT_EQ(step.at("per_rank").at("rollout_s").size(), 2U);
    EXPECT_TRUE(step.at("seconds").is_number()) << "the log's own";
  }
  EXPECT_EQ(steps, rewards.size());
}

// Times are of all processes that have worked on a stage, and on the run.
TEST(Results, AddTheTimesOfARunThatGoesOn) {
  const Folder folder;
  auto o = options(folder / "run");
  o.order = {"even"};
  left_by_ranks(1, o);
  const auto read = [&] { return Json::parse(contents(folder / "run/results.json")); };
  const auto before = read();
  EXPECT_GT(before.at("stages")[0].at("seconds").at("rollout").get<double>(), 0);
  // As runs of before 0.1.0 called this option.
  std::string run = contents(folder / "run/run.txt");
  const std::string option = "--log-eval-all";
  run.replace(run.find(option), option.size(), "--log-all");
  const size_t calls = run.find("--parallel-calls");
  run.erase(calls, run.find('\n', calls) + 1 - calls);
  write(folder / "run/run.txt", run);
  o.resume = true;  // there is nothing left to do
  left_by_ranks(2, o);
  const auto after = read();
  EXPECT_EQ(after.at("stages")[0].at("seconds").at("rollout"),
            before.at("stages")[0].at("seconds").at("rollout"));
  EXPECT_EQ(after.at("seconds").at("rollout"), before.at("seconds").at("rollout"));
  EXPECT_GT(after.at("seconds").at("warm_up"), before.at("seconds").at("warm_up"));
  EXPECT_EQ(after.at("started"), before.at("started"));
}

TEST(RunState, KeepsWhatItHasAndReadsOldOnes) {
  const rl::RunState state{.curve = {{.own_reward = .5}, {.iteration = 1}},
                           .started = "2026-01-01T00:00:00Z",
                           .all_seconds = {{"rollout", 1.5}}};
  const auto again = rl::RunState::from_json(state.to_json());
  EXPECT_EQ(again.curve.at(0).own_reward, .5);
  EXPECT_FALSE(again.curve.at(1).own_reward);
  EXPECT_EQ(again.started, state.started);
  EXPECT_EQ(again.all_seconds, state.all_seconds);
  const auto old = rl::RunState::from_json(
      R"({"position": 1, "iterations": 1, "log_lines": 2, "rows": [], "ends": [], "seconds": [],
          "curve": [[0, 0, 0.5, 0, 1, 2, true, 0, 0, 0, 0, 1, 0.25]]})");
  EXPECT_EQ(old.curve.at(0).own_reward, .25);
  EXPECT_TRUE(old.started.empty() && old.all_seconds.empty());
}

TEST(Results, SayOfATrialWhetherThereWasSomethingToTell) {
  rl::Rollout rollout{.outcomes = std::vector<rl::Outcome>(4), .numbers = {{0, 1, 2, 3}}};
  const std::vector<std::map<std::string, double>> parts = {
      {{"ENV_ASSERTION", 1}}, {{"DB", 1}, {"COMMUNICATE", 0}}, {{"COMMUNICATE", 1}}, {{"told", 1}}};
  rollout.episodes.emplace_back();
  for (const auto& part : parts) {
    rollout.episodes.back().push_back({.reward = {.parts = part}, .end = End::UserStop});
  }
  rl::RunState state{.rows = {{rl::cell_of(rollout, comm::Group())}}};
  const auto told = [](const rl::RunState& of, size_t i) { return of.rows[0][0].trials[i].told; };
  for (const auto& each : {state, rl::RunState::from_json(state.to_json())}) {
    EXPECT_EQ(told(each, 0), std::nullopt);
    EXPECT_EQ(told(each, 1), false);
    EXPECT_EQ(told(each, 2), true);
    EXPECT_EQ(told(each, 3), true);
  }
}

// An iteration that replays earlier domains alone is no point of the stage's learning curve.
TEST(OwnReward, IsNothingWithoutTasksOfTheStage) {
  const rl::Rollout rollout{.outcomes = {{.reward = 1}, {.reward = .5}}};
  const rl::RolloutPlan plan{
      .episodes = {{.task = {"even", "train", "0"}}, {.task = {"again", "train", "0"}}}};
  EXPECT_EQ(rl::own_reward(rollout, plan, {.domain = "again"}), .5);
  EXPECT_EQ(rl::own_reward(rollout, plan, {.domain = "joint"}), .75);
  EXPECT_FALSE(rl::own_reward(rollout, plan, {.domain = "other"}));
  const rl::Curriculum curriculum{
      .stages = {{.id = "stage_1_even", .domain = "even"}},
      .columns = {{.domain = "even", .evaluation = {{"even", "test", "0"}}}}};
  auto o = options("");
  o.eval_trials = 1;
  const rl::Cell cell{.trials = {{.reward = 1}}};
  const rl::RunState state{.rows = {{cell}, {cell}},
                           .curve = {{.own_reward = .5}, {}, {.own_reward = 1}}};
  const auto record = rl::record_of(curriculum, o, state, {},
                                    {{{"even", "test", "0"}, std::vector<rl::ToolCall>()}});
  EXPECT_THAT(record.stages.at(0).curve, testing::ElementsAre(.5, 1));
  EXPECT_EQ(record.stages.at(0).episodes, 3 * 5 * 3);
}

TEST(EqualGroups, AreWarnedOfOnceWhenTheyLast) {
  const Folder folder;
  const auto said = [&](const char* name, int64_t iterations, bool grpo) {
    auto o = options(folder / name);
    o.order = {"even"};
    o.iterations = iterations;
    o.use_grpo = grpo;
    o.temperature = 1e-3;  // all episodes of a group are the same
    testing::internal::CaptureStderr();
    left_by_ranks(2, o);
    return testing::internal::GetCapturedStderr();
  };
  const std::string warning = "in each of the last 10 iterations (up to 10 of 12) more than 0.6";
  const std::string twelve = said("12", 12, true);
  EXPECT_THAT(twelve, HasSubstr(warning));
  EXPECT_EQ(twelve.find("equal rewards"), twelve.rfind("equal rewards")) << twelve;
  EXPECT_THAT(said("9", 9, true), testing::Not(HasSubstr("equal rewards")));
  EXPECT_THAT(said("imitates", 10, false), testing::Not(HasSubstr("equal rewards")));
}

}  // namespace
}  // namespace lockstep::test
