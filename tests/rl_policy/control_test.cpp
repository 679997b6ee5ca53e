// What a run is compared with, and tasks that become harder.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "lockstep/core/error.h"
#include "rl/run/setup.h"
#include "rl_policy/even_course.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using testing::HasSubstr;
using Json = nlohmann::ordered_json;

std::vector<Json> learning_in(const std::string& trajectories) {
  std::vector<Json> out;
  std::istringstream lines(trajectories);
  for (std::string line; std::getline(lines, line);) {
    auto episode = Json::parse(line);
    if (episode.at("phase") == "learn") out.push_back(std::move(episode));
  }
  return out;
}

RunOptions joint(const std::string& folder) {
  auto o = options(folder);
  o.replay = 0;
  o.joint = true;
  return o;
}

std::string refusal(const RunOptions& o) {
  return message_of<ConfigError>([&] { rl::run_continual(World::solo(), course(), o); });
}

TEST(JointRun, LearnsAllDomainsInOneStageOnAnyNumberOfRanks) {
  const Folder folder;
  const Left one = left_by_ranks(1, joint(folder / "1"));
  EXPECT_EQ(left_by_ranks(3, joint(folder / "3")), one);
  std::map<int, std::set<std::string>> domains;  // by iteration
  for (const auto& episode : learning_in(one.trajectories)) {
    EXPECT_EQ(episode.at("stage"), 1);
    domains[episode.at("iteration")].insert(episode.at("domain"));
  }
  ASSERT_EQ(domains.size(), 4U);  // as many as two stages have
  for (const auto& [iteration, all] : domains) {
    EXPECT_EQ(all, (std::set<std::string>{"again", "even"})) << iteration;
  }
  const auto results = Json::parse(contents(folder / "1/results.json"));
  EXPECT_EQ(results.at("matrix").at("rows"), (Json{"no stage", "stage_1_joint"}));
  EXPECT_EQ(results.at("matrix").at("columns"), (Json{"even", "again"}));
  const auto& r = results.at("matrix").at("R");
  ASSERT_EQ(r.size(), 2U);
  const double mean = (r[1][0].get<double>() + r[1][1].get<double>()) / 2;
  EXPECT_EQ(results.at("stages")[0].at("eval_reward"), mean);
  EXPECT_NEAR(results.at("stages")[0].at("pass_k_rates").at("1").get<double>(), mean, 1e-12);
  const auto metrics = Json::parse(one.metrics);
  EXPECT_EQ(metrics.at("matrix").at("acc"), mean);
  EXPECT_TRUE(metrics.at("matrix").at("bwt").is_null());
  EXPECT_EQ(metrics.at("guides").at("note"), "not defined for a joint run");
  EXPECT_EQ(metrics.at("baselines").at("null").size(), 2U);
  EXPECT_THAT(contents(folder / "1/analysis_report.md"), HasSubstr("## stage_1_joint"));
  EXPECT_EQ(Json::parse(contents(folder / "1/curriculum.json"))
                .at("stages")[0]
                .at("evaluation_tasks")
                .size(),
            6U);
}

TEST(JointRun, GoesOnWhereItWasKilled) {
  const Folder folder;
  const Left undisturbed = left_by_ranks(1, joint(folder / "undisturbed"));
  auto o = joint(folder / "killed");
  o.resume = true;
  const auto statuses = spawn(2,
                              [&](World& world) {
                                // Of 636 in the warm-up, 6 of baselines, 4 of its evaluations and
                                // 6 an iteration.
                                if (world.rank() == 1) worlds_left = 654;
                                rl::run_continual(world, course(), o);
                              },
                              {.doomed = {0, 1}});
  ASSERT_TRUE(WIFSIGNALED(statuses[1]) && WTERMSIG(statuses[1]) == SIGKILL) << statuses[1];
  EXPECT_EQ(left_by_ranks(3, o), undisturbed);
}

TEST(JointRun, IsWhatStagesAreComparedWith) {
  const Folder folder;
  left_by_ranks(2, joint(folder / "joint"));
  auto o = options(folder / "stages");
  left_by_ranks(2, o);
  const auto intransigence = [&] {
    return Json::parse(contents(folder / "stages/metrics.json"))
        .at("matrix")
        .value("intransigence", Json());
  };
  EXPECT_TRUE(intransigence().is_null());
  // Also later, of a run that is over.
  o.joint_run = folder / "joint";
  o.resume = true;
  left_by_ranks(1, o);
  const auto rewards = [&](const char* run) {
    return Json::parse(contents(folder / (run + std::string("/results.json"))))
        .at("matrix")
        .at("R")
        .get<std::vector<std::vector<double>>>();
  };
  const auto all = rewards("joint"), mine = rewards("stages");
  EXPECT_NEAR(intransigence().get<double>(), (all[1][0] - mine[1][0] + all[1][1] - mine[2][1]) / 2,
              1e-12);
}

TEST(JointRun, IsRefusedWhereItSaysNothing) {
  const Folder folder;
  left_by_ranks(1, joint(folder / "joint"));
  auto one = options(folder / "one");
  one.order = {"even"};
  left_by_ranks(1, one);
  isolated([&] {
    auto o = options(folder / "run");
    o.joint_run = folder / "none";
    EXPECT_THAT(refusal(o), HasSubstr("/none has no results.json that can be read"));
    o.joint_run = folder / "one";
    EXPECT_THAT(refusal(o), HasSubstr("/one is not a run with --joint"));
    o.joint_run = folder / "joint";
    o.eval_trials = 1;
    EXPECT_THAT(refusal(o), HasSubstr("/joint was measured with --eval-trials 2, this run with 1"));
    o.eval_trials = 2;
    o.mixed = "drop";
    EXPECT_THAT(refusal(o),
                HasSubstr("/joint was measured with --mixed refuse, this run with drop"));
    o.mixed = "refuse";
    o.parallel_calls = true;
    EXPECT_THAT(refusal(o), HasSubstr("--parallel-calls false, this run with true"));
    o = joint(folder / "run");
    o.replay = 0.5;
    EXPECT_THAT(refusal(o), HasSubstr("--joint has no earlier domains that --replay 0.5"));
    o = joint(folder / "run");
    o.order = {"even"};
    EXPECT_THAT(refusal(o), HasSubstr("--joint needs two domains or more"));
    o = joint(folder / "run");
    o.joint_run = folder / "joint";
    EXPECT_THAT(refusal(o), HasSubstr("leave one of them out"));
  });
}

// The files may be elsewhere, but not others.
TEST(JointRun, HasToBeMeasuredOnTheSameFilesOfTasks) {
  const Folder folder;
  write(folder / "tasks.json", "[1]");
  write(folder / "copy.json", "[1]");
  write(folder / "others.json", "[2]");
  auto o = options(folder / "run");
  o.order = {"airline"};
  const auto measured_on = [&](const std::string& path) {
    auto joint = o;
    joint.joint = true;
    if (!path.empty()) joint.task_files["airline"] = path;
    const Json results = {{"config", joint.as_text()},
                          {"matrix", {{"columns", {"airline"}}, {"R", {{0.}, {.5}}}}}};
    write(folder / "joint.json", results.dump());
    std::filesystem::create_directories(folder / "joint");
    std::filesystem::rename(folder / "joint.json", folder / "joint/results.json");
  };
  o.joint_run = folder / "joint";
  const auto rewards = [&](const std::string& path) {
    o.task_files["airline"] = path;
    return rl::joint_rewards(comm::Group(), o);
  };
  const auto refused = [&](const std::string& path) {
    return message_of<ConfigError>([&] { rewards(path); });
  };
  measured_on(folder / "tasks.json");
  EXPECT_EQ(rewards(folder / "tasks.json").at("airline"), .5);
  EXPECT_EQ(rewards(folder / "copy.json").at("airline"), .5);
  EXPECT_THAT(refused(folder / "others.json"),
              testing::AllOf(HasSubstr("was measured with --airline-tasks " + (folder / "tasks")),
                             HasSubstr("this run with " + (folder / "others.json"))));
  EXPECT_THAT(refused(""), HasSubstr("this run with ''"));
  measured_on("");
  EXPECT_EQ(rewards("").at("airline"), .5);
  EXPECT_THAT(refused(folder / "tasks.json"), HasSubstr("--airline-tasks '', this run with /"));
}

TEST(Ramp, BeginsWithTasksOfTheFirstLevel) {
  const Folder folder;
  const auto ramp = [&](const char* name) {
    auto o = options(folder / name);
    o.iterations = 3;
    o.ramp = 2;
    return o;
  };
  const Left one = left_by_ranks(1, ramp("1"));
  EXPECT_EQ(left_by_ranks(3, ramp("3")), one);
  std::map<int, std::set<bool>> easier;  // by iteration, of a stage's own tasks
  for (const auto& episode : learning_in(one.trajectories)) {
    const std::string id = episode.at("id");
    const bool is_own = (episode.at("stage") == 1) == (episode.at("domain") == "even");
    if (is_own) {
      easier[episode.at("iteration")].insert(id.ends_with("@1"));
    } else {  // what is replayed
      EXPECT_FALSE(id.ends_with("@1")) << id;
    }
  }
  EXPECT_EQ(easier[0], std::set{true});
  EXPECT_EQ(easier[1], (std::set{false, true}));
  EXPECT_EQ(easier[2], std::set{false});
  isolated([&] {
    auto o = ramp("1");
    o.resume = true;
    o.ramp = 1;
    EXPECT_THAT(refusal(o), HasSubstr("has another run; here: --ramp 1"));
    auto levelled = course();
    levelled.easier = {};
    EXPECT_THAT(
        message_of<ConfigError>([&] { rl::run_continual(World::solo(), levelled, ramp("none")); }),
        HasSubstr("--ramp: tasks of this course have one level"));
  });
}

}  // namespace
}  // namespace lockstep::test
