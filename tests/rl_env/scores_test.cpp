// What was learnt and forgotten: values worked out by hand.
#include "lockstep/rl/scores.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "lockstep/core/error.h"
#include "support/thrown.h"

namespace lockstep::rl {
namespace {

using test::message_of;
using testing::HasSubstr;

const std::vector<std::vector<double>> kR = {
    {.1, .1, .1}, {.5, .2, .1}, {.4, .6, .2}, {.3, .5, .7}};

TEST(ContinualScore, IsAsThePapersHaveIt) {
  const auto scores = continual_scores(kR, {.random = {{0, 0, 0}}, .joint = {{.6, .6, .6}}});
  EXPECT_NEAR(scores.acc, .5, 1e-12);
  EXPECT_NEAR(*scores.bwt, -.15, 1e-12);
  EXPECT_NEAR(*scores.fwt, .1, 1e-12);
  EXPECT_NEAR(*scores.fwt_random, .2, 1e-12);
  EXPECT_NEAR(*scores.forgetting, .15, 1e-12);
  EXPECT_NEAR(scores.learning_accuracy, .6, 1e-12);
  EXPECT_NEAR(*scores.intransigence, 0, 1e-12);
  EXPECT_NEAR(scores.gain_per_stage.at(2), .5, 1e-12);
  EXPECT_NEAR(*scores.cross_domain, (.1 + 0 + .1) / 3, 1e-12);
}

TEST(ContinualScore, OneStageTransfersNothing) {
  const auto scores = continual_scores(std::vector<std::vector<double>>{{.1}, {.4}});
  EXPECT_FALSE(scores.bwt || scores.fwt || scores.forgetting || scores.intransigence);
  EXPECT_EQ(scores.acc, .4);
  EXPECT_THROW(continual_scores({}), ConfigError);
  EXPECT_THROW(continual_scores(std::vector<std::vector<double>>{{.1, .2}, {.4, .3}}), ConfigError);
}

TEST(PassK, IsUnbiased) {
  const std::vector<int64_t> succeeded = {4, 3, 0, 1};
  const auto mean = [&](auto pass, int64_t k) {
    double sum = 0;
    for (const auto c : succeeded) sum += pass(Trials{.succeeded = c, .of = 4}, k);
    return sum / 4;
  };
  EXPECT_NEAR(mean(pass_hat_k, 1), .5, 1e-12);
  EXPECT_NEAR(mean(pass_hat_k, 2), .375, 1e-12);
  EXPECT_NEAR(mean(pass_hat_k, 3), .3125, 1e-12);
  EXPECT_NEAR(mean(pass_hat_k, 4), .25, 1e-12);
  EXPECT_NEAR(mean(pass_at_k, 2), .625, 1e-12);
  EXPECT_NEAR(mean(pass_at_k, 4), .75, 1e-12);
  EXPECT_THROW(pass_hat_k({.succeeded = 1, .of = 2}, 3), ConfigError);
}

TEST(Curves, AreAreas) {
  EXPECT_EQ(area_under(std::vector{.3}), .3);
  EXPECT_NEAR(area_under(std::vector{0., .5, 1.}), .5, 1e-12);
  EXPECT_NEAR(early_area(std::vector<double>(30, .25)), .25, 1e-12);
  std::vector<double> late(20, 1);
  std::fill_n(late.begin(), 11, 0);
  EXPECT_EQ(early_area(late), 0);
  EXPECT_THROW(area_under({}), ConfigError);
}

TEST(Intervals, CoverWhatTheyShould) {
  const auto wide = wilson({.succeeded = 8, .of = 10});
  EXPECT_NEAR(wide.low, .4902, 1e-4);  // Wilson 1927, as statsmodels has it
  EXPECT_NEAR(wide.high, .9433, 1e-4);
  EXPECT_EQ(wilson({.succeeded = 0, .of = 5}).low, 0);
  EXPECT_THAT(message_of<ConfigError>([] { wilson({.succeeded = 0, .of = 0}); }),
              HasSubstr("wilson: 0 of 0 trials"));
  const auto mean = [](std::span<const int64_t> drawn) {
    double sum = 0;
    for (const auto i : drawn) sum += i < 50;
    return sum / static_cast<double>(drawn.size());
  };
  const auto half = bootstrap(100, 1, mean);
  EXPECT_NEAR(half.low, .40, .02);
  EXPECT_NEAR(half.high, .60, .02);
  EXPECT_EQ(bootstrap(100, 1, mean).low, half.low);
  EXPECT_THROW(bootstrap(0, 1, mean), ConfigError);
}

EvaluatedTask task(std::string id, std::string tool, std::vector<double> rewards) {
  EvaluatedTask made{.id = std::move(id), .gold = {"look", std::move(tool)}};
  for (const double reward : rewards) {
    made.trials.push_back({.reward = reward,
                           .called = {"look", reward > 0 ? made.gold[1] : "wrong"},
                           .calls = 2,
                           .good_calls = reward > 0 ? 2 : 1,
                           .told = reward > 0});
  }
  return made;
}

RunRecord two_stages() {
  const auto column = [](std::string tool, double a, double b) {
    auto tasks = std::vector{task("0", tool, {a, a}), task("1", tool, {b, 0})};
    tasks[1].has_argument = true;
    return tasks;
  };
  RunRecord run;
  run.stages = {{.stage_id = "stage_1_airline",
                 .domain = "airline",
                 .curve = {0, 1},
                 .episodes = 10,
                 .training_tools = {{"look", "fly"}}},
                {.stage_id = "stage_2_retail", .domain = "retail", .curve = {.5}, .episodes = 20}};
  run.cells = {{column("fly", 0, 0), column("ship", 0, 0)},
               {column("fly", 1, 1), column("ship", 0, 1)},
               {column("fly", 1, 0), column("ship", 1, 1)}};
  run.baselines = {{"null", {{"airline", 0}}}};
  run.seed = 3;
  return run;
}

TEST(MetricsJson, HasEachFigureUnderItsName) {
  const auto json = nlohmann::json::parse(metrics_json(two_stages()));
  const auto& matrix = json.at("matrix");
  EXPECT_EQ(matrix.at("R").dump(), "[[0.0,0.0],[0.75,0.25],[0.5,0.75]]");
  EXPECT_EQ(matrix.at("acc"), .625);
  EXPECT_EQ(matrix.at("bwt"), -.25);
  EXPECT_EQ(matrix.at("fwt"), .25);
  EXPECT_EQ(matrix.at("forgetting"), .25);
  EXPECT_EQ(matrix.at("gain_per_stage").dump(), "[0.75,0.5]");
  EXPECT_FALSE(matrix.contains("intransigence"));
  EXPECT_LE(matrix.at("bwt_ci95")[0], -.25);
  EXPECT_GE(matrix.at("bwt_ci95")[1], -.25);
  // Both tasks of retail are solved at least half of the time, whichever are drawn.
  EXPECT_EQ(matrix.at("R_ci95")[2][1].dump(), "[0.5,1.0]");
  EXPECT_EQ(json.at("basic").at("average_reward"), .75);
  EXPECT_EQ(json.at("basic").at("final_reward"), .75);
  EXPECT_EQ(json.at("basic").at("pass_hat_k").dump(), "{\"1\":0.625,\"2\":0.5}");
  EXPECT_EQ(json.at("basic").at("pass_at_k").at("2"), .75);
  EXPECT_EQ(json.at("continual_learning").at("tool_level_forgetting").at("fly"), .25);
  EXPECT_NEAR(json.at("continual_learning").at("tool_level_retention").at("fly"), 2 / 3., 1e-12);
  const auto& continual = json.at("continual_learning");
  EXPECT_EQ(continual.at("forward_transfer_per_stage").dump(), "[null,0.25]");
  EXPECT_EQ(continual.at("backward_transfer_per_stage").dump(), "[-0.25,null]");
  const auto& efficiency = json.at("learning_efficiency");
  EXPECT_EQ(efficiency.at("aulc_training"), .5);
  EXPECT_EQ(efficiency.at("aulc"), .5);
  EXPECT_EQ(efficiency.at("learning_efficiency_per_stage").dump(), "[0.05,0.025]");
  EXPECT_NEAR(efficiency.at("learning_efficiency").get<double>(), .0375, 1e-12);
  EXPECT_EQ(json.at("generalization").at("tool_composition"), .75);  // retail's
  EXPECT_EQ(json.at("generalization").at("parameter"), .25);
  EXPECT_EQ(json.at("generalization").at("cross_domain"), .25);
  EXPECT_EQ(json.at("fine_grained").at("tool_selection"), .5 + .5 * .625);
  EXPECT_EQ(json.at("fine_grained").at("tool_output_usage"), .625);
  EXPECT_EQ(json.at("null_agent").at("airline"), 0);
  const auto& guides = json.at("guides");
  EXPECT_EQ(guides.at("note"), "not comparable");
  EXPECT_EQ(guides.at("forward_transfer_per_stage").dump(), "[0.0,0.25]");
  EXPECT_EQ(guides.at("backward_transfer").get<double>(), -.125);
  EXPECT_EQ(guides.at("aulc"), .375);
  EXPECT_EQ(guides.at("learning_efficiency"), .375 / 30);
  EXPECT_EQ(guides.at("pass_at_k").at("4"), .75);
  EXPECT_EQ(json.at("protocol").at("n_trials"), 2);
}

TEST(StageScores, AreOfTheEvaluationAfterTheStage) {
  auto run = two_stages();
  run.retention_tasks = 1;
  run.cells[2][1][0].trials[0].failed = {"ship"};
  const auto second = stage_scores(run, 1);
  EXPECT_EQ(second.pass_hat_k, (std::map<int64_t, double>{{1, .75}, {2, .5}}));
  EXPECT_EQ(second.new_tool_success, .75);
  EXPECT_EQ(second.retention, 1);  // of the first task alone
  ASSERT_EQ(second.tools.size(), 2U);
  const auto& ship = second.tools.at("ship");
  EXPECT_EQ(ship.selection, .75);  // one trial of four called another
  EXPECT_NEAR(ship.invocation.value(), 2 / 3., 1e-12);
  EXPECT_EQ(ship.output_usage, .75);
  EXPECT_EQ(ship.success, .75);
  EXPECT_EQ(second.tools.at("look").selection, 1);
  run.cells[2][1] = {task("0", "fly", {1}), task("1", "fly", {1})};
  run.cells[0][1] = run.cells[1][1] = run.cells[2][1];
  run.cells[0][0] = run.cells[1][0] = run.cells[2][0] = run.cells[0][1];
  EXPECT_FALSE(stage_scores(run, 1).new_tool_success);
  EXPECT_FALSE(stage_scores(run, 0).retention);
  EXPECT_THROW(stage_scores(run, 2), ConfigError);
}

TEST(OutputUsage, IsOfTrialsInWhichThereIsSomethingToTell) {
  auto run = two_stages();
  auto& last = run.cells[2];
  last[0][0].trials[0].told = std::nullopt;  // five of eight had been told
  last[1][0].trials[0].told = false;
  last[1][0].trials[1].told = std::nullopt;
  const auto usage = [&] {
    return nlohmann::json::parse(metrics_json(run)).at("fine_grained").at("tool_output_usage");
  };
  EXPECT_NEAR(usage().get<double>(), 2 / 6., 1e-12);
  EXPECT_NEAR(stage_scores(run, 1).tools.at("ship").output_usage.value(), 1 / 3., 1e-12);
  for (auto& column : last) {
    for (auto& task : column) {
      for (auto& trial : task.trials) trial.told = std::nullopt;
    }
  }
  EXPECT_TRUE(usage().is_null());
  EXPECT_FALSE(stage_scores(run, 1).tools.at("ship").output_usage);
  EXPECT_EQ(stage_scores(run, 1).tools.at("ship").success, .75);
}

TEST(MetricsJson, AStageWithoutACurveKeepsItsPlace) {
  auto run = two_stages();
  run.stages[0].curve.clear();
  const auto efficiency = nlohmann::json::parse(metrics_json(run)).at("learning_efficiency");
  EXPECT_EQ(efficiency.at("aulc_training"), .5);
  EXPECT_EQ(efficiency.at("aulc_training_per_stage").dump(), "[null,0.5]");
  EXPECT_EQ(efficiency.at("lca10_per_stage").dump(), "[null,0.5]");
}

TEST(MetricsJson, OneStageAndOneTrial) {
  RunRecord run;
  run.stages = {{.stage_id = "stage_1_airline", .domain = "airline"}};
  run.cells = {{{task("0", "fly", {0})}}, {{task("0", "fly", {1})}}};
  const auto json = nlohmann::json::parse(metrics_json(run));
  EXPECT_TRUE(json.at("matrix").at("bwt").is_null());
  EXPECT_TRUE(json.at("null_agent").is_null());
  EXPECT_TRUE(json.at("learning_efficiency").at("lca10").is_null());
  EXPECT_TRUE(json.at("basic").contains("pass_hat_1_ci95"));
}

// Each column draws from its own tasks, however many the others have.
TEST(MetricsJson, IntervalsAreOfTheirColumn) {
  const auto column = [](int tasks, int solved) {
    std::vector<EvaluatedTask> out;
    for (int i = 0; i < tasks; ++i) {
      out.push_back(task(std::to_string(i), "fly", {i < solved ? 1. : 0.}));
    }
    return out;
  };
  auto run = two_stages();
  run.cells.assign(3, {column(100, 50), column(150, 75)});
  const auto json = nlohmann::json::parse(metrics_json(run));
  for (const size_t j : {0, 1}) {
    const auto& interval = json.at("matrix").at("R_ci95")[2][j];
    EXPECT_NEAR(interval[0].get<double>(), .42, .04) << j;
    EXPECT_NEAR(interval[1].get<double>(), .58, .04) << j;
    EXPECT_EQ(json.at("matrix").at("gain_per_stage_ci95")[j].dump(), "[0.0,0.0]");
  }
}

TEST(MetricsJson, RefusesCellsThatDoNotFit) {
  auto run = two_stages();
  run.cells[1][0].pop_back();
  EXPECT_THROW(metrics_json(run), ConfigError);
  run = two_stages();
  run.cells[2][1][0].trials.pop_back();
  EXPECT_THROW(metrics_json(run), ConfigError);
  run = two_stages();
  run.cells[2][1][0].id = "7";
  EXPECT_THROW(metrics_json(run), ConfigError);
  run = two_stages();
  run.cells.pop_back();
  EXPECT_THROW(metrics_json(run), ConfigError);
}

}  // namespace
}  // namespace lockstep::rl
