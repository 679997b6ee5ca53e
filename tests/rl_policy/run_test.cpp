#include "lockstep/rl/run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <sstream>

#include "lockstep/core/error.h"
#include "lockstep/models/pretrained.h"
#include "rl_policy/even_course.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;
using Json = nlohmann::ordered_json;

TEST(ContinualRun, LeavesTheSameBitsOnAnyNumberOfRanks) {
  const Folder folder;
  const auto eight_lanes = [&](const Ranks& ranks) {  // some of which have no task
    auto o = options(folder / ranks.name());
    o.lanes = 8;
    return left_by_ranks(ranks, o);
  };
  const Left one = eight_lanes({"auto", 1});
  EXPECT_THAT(one.trajectories, HasSubstr("\"phase\":\"learn\",\"stage\":2,\"iteration\":1"));
  EXPECT_THAT(one.trajectories, HasSubstr("\"reward\":1.0"));
  EXPECT_THAT(one.trajectories, HasSubstr("\"reward\":0.0"));
  for (const auto& ranks :
       {Ranks{"gloo", 2}, {"auto", 3}, {"host-then-net", 4, {0, 0, 1, 1}}, {"tcp", 2}}) {
    EXPECT_EQ(eight_lanes(ranks), one) << ranks.name();
  }
}

TEST(ContinualRun, LeavesEveryFile) {
  const Folder folder;
  left_by_ranks(1, options(folder / "run"));
  for (const char* name :
       {"curriculum.json", "results.json", "metrics.json", "trajectories.jsonl", "report.html",
        "analysis_report.md", "learning_curves.svg", "stage_performance.svg",
        "transfer_metrics.svg", "retention_performance.svg", "grpo_checkpoints/stage_2_again"}) {
    EXPECT_TRUE(fs::exists(fs::path(folder / "run") / name)) << name;
  }
}

// All that the run says can be computed again from what it has logged.
TEST(ContinualRun, MeasuresWhatIsInItsTrajectories) {
  const Folder folder;
  auto o = options(folder / "run");
  o.log_all = true;
  o.export_hf = true;
  const Left left = left_by_ranks(2, o);
  const auto metrics = Json::parse(left.metrics);
  std::map<int, std::map<std::string, std::vector<double>>> rewards;
  double learnt = 0;
  std::istringstream lines(left.trajectories);
  for (std::string line; std::getline(lines, line);) {
    const auto episode = Json::parse(line);
    const bool learns = episode.at("phase") == "learn";
    const double reward = episode.at("reward");
    if (learns) learnt += episode.at("stage") == 1 ? reward : 0;
    if (!learns) rewards[episode.at("row")][episode.at("domain")].push_back(reward);
  }
  const auto mean = [](const std::vector<double>& values) {
    return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  };
  const auto& matrix = metrics.at("matrix");
  for (int i = 0; i <= 2; ++i) {
    for (int j = 0; j < 2; ++j) {
      const auto& of = rewards.at(i).at(o.order[static_cast<size_t>(j)]);
      EXPECT_EQ(of.size(), 6U);
      EXPECT_NEAR(matrix.at("R")[i][j].get<double>(), mean(of), 1e-12);
    }
  }
  // Of two iterations with five groups of three each, the first stage replays nothing.
  EXPECT_NEAR(metrics.at("learning_efficiency").at("aulc_training_per_stage")[0].get<double>(),
              learnt / 30, 1e-12);
  for (const char* key : {"basic", "continual_learning", "learning_efficiency", "generalization",
                          "fine_grained", "matrix", "guides", "baselines", "null_agent"}) {
    EXPECT_TRUE(metrics.contains(key)) << key;
  }
  EXPECT_EQ(metrics.at("protocol").at("n_trials"), 2);
  EXPECT_EQ(metrics.at("guides").at("learning_efficiency_per_stage").size(), 2U);
  EXPECT_EQ(metrics.at("baselines").at("null").at("even"), 0);
  // Each stage's checkpoint stands alone, also as a folder of transformers.
  const auto net =
      models::load_transformer(folder / "run/grpo_checkpoints/stage_2_again/huggingface");
  EXPECT_GT(net->options.layers, 0);
  // Without what ends its messages, generate() of transformers would go on to its limit.
  const std::string exported = folder / "run/grpo_checkpoints/stage_2_again/huggingface/";
  const auto tokenizer = text::Tokenizer::from_file(exported);
  const Json ends = {tokenizer.id_of("<|im_end|>").value(),
                     tokenizer.id_of("<|endoftext|>").value()};
  EXPECT_EQ(Json::parse(contents(exported + "generation_config.json")).at("eos_token_id"), ends);
  EXPECT_EQ(Json::parse(contents(exported + "config.json")).at("eos_token_id"), ends[0]);
}

// A folder of transformers with a model that can end its messages.
void make_model(const std::string& folder) {
  spawn(1, [&](World& world) {
    const auto made = rl::warm_up(world, course().demonstrate, course().text, course().arenas,
                                  {.steps = 12,
                                   .batch = 3,
                                   .lanes = 4,
                                   .corpus = 20,
                                   .model = {.layers = 1,
                                             .hidden = 32,
                                             .feed_forward = 32,
                                             .heads = 2,
                                             .kv_heads = 1,
                                             .head_dim = 16,
                                             .max_length = 512}});
    models::save_transformer(made.net, folder);
    made.tokenizer.save(folder + "/tokenizer.json");
  });
}

RunOptions with_model(const std::string& model, const std::string& folder) {
  auto o = options(folder);
  o.model = model;
  o.chat_format = "compact";
  o.context = 512;
  return o;
}

TEST(ContinualRun, TrainsTheModelOfAFolder) {
  const Folder folder;
  // Where transformers keeps what it has downloaded.
  const std::string kept = folder / "hub/models--some--model";
  fs::create_directories(kept + "/refs");
  fs::create_directories(kept + "/snapshots");
  write(kept + "/refs/main", "a1b2");
  make_model(kept + "/snapshots/a1b2");
  const Left one = left_by_ranks(1, with_model(kept + "/snapshots/a1b2", folder / "1"));
  EXPECT_THAT(one.trajectories, HasSubstr("\"reward\":1.0"));
  EXPECT_THAT(one.trajectories, HasSubstr("\"reward\":0.0"));
  setenv("HF_HUB_CACHE", (folder / "hub").c_str(), 1);
  Left three = left_by_ranks(3, with_model("some/model", folder / "3"));
  unsetenv("HF_HUB_CACHE");
  EXPECT_EQ(three, one);
  spawn(2, [&](World& world) {
    auto o = with_model(kept + "/snapshots/a1b2", folder / "longer");
    o.context = 513;
    EXPECT_THAT(message_of<ConfigError>([&] { rl::run_continual(world, course(), o); }),
                HasSubstr("--context 513 is more than the 512 positions of /"));
  });
}

TEST(ContinualRun, ExportsWhatAModelsFolderHasForItsChats) {
  const Folder folder;
  make_model(folder / "model");
  write(folder / "model/chat_template.jinja", "{{ messages }}");
  write(folder / "model/generation_config.json", R"({"eos_token_id": [1, 2], "top_k": 20})");
  auto o = with_model(folder / "model", folder / "run");
  o.order = {"even"};
  o.iterations = 1;
  o.export_hf = true;
  left_by_ranks(2, o);
  const std::string exported = folder / "run/grpo_checkpoints/stage_1_even/huggingface/";
  for (const char* name : {"chat_template.jinja", "generation_config.json"}) {
    EXPECT_EQ(contents(exported + name), contents(folder / ("model/" + std::string(name))));
  }
}

TEST(ContinualRun, TakesItsWarmUpFromTheCache) {
  const Folder folder;
  auto o = options(folder / "makes");
  o.order = {"even"};
  o.iterations = 1;
  o.cache = true;
  o.cache_dir = folder / "cache";
  const Left made = left_by_ranks(1, o);
  o.output_dir = folder / "takes";
  testing::internal::CaptureStderr();
  const Left taken = left_by_ranks(2, o);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              Not(HasSubstr("begins with other parameters")));
  EXPECT_EQ(taken, made);
}

// What a run of tau2's fake tasks leaves.
void run_with_tau2(const World& world, const RunOptions& o) {
  const std::vector<std::string> command = {"python3",
                                            LOCKSTEP_SOURCE_DIR "/tests/rl_env/tau2_fake.py"};
  rl::run_continual(world, rl::tau2_course(o, {.command = command}), o);
}

Left left_by_tau2(int ranks, const RunOptions& o) {
  spawn(ranks, [&](World& world) { run_with_tau2(world, o); });
  return left_by(o.output_dir);
}

TEST(ContinualRun, PlaysTasksOfTau2) {
  const Folder folder;
  make_model(folder / "model");
  auto o = with_model(folder / "model", folder / "run");
  o.env = "tau2";
  o.order = {"airline", "retail"};
  left_by_tau2(2, o);
  const auto metrics = Json::parse(contents(folder / "run/metrics.json"));
  EXPECT_EQ(metrics.at("matrix").at("columns"), (Json{"airline", "retail"}));
  EXPECT_EQ(metrics.at("baselines").at("null").at("retail"), 1);  // that of an idle agent, there
  EXPECT_THAT(contents(folder / "run/trajectories.jsonl"), HasSubstr("Reason for call: help"));
  const auto results = Json::parse(contents(folder / "run/results.json"));
  EXPECT_EQ(results.at("environment").at("tau2_version"), "fake");
}

TEST(ContinualRun, PlaysTasksOfTau2WithAModelAsTheUser) {
  const Folder folder;
  make_model(folder / "model");
  const auto played = [&](const char* name) {
    auto o = with_model(folder / "model", folder / name);
    o.env = "tau2";
    o.user = "model";
    o.order = {"airline"};
    o.context = 256;  // tau2's prompts and what a tiny model says
    return o;
  };
  const Left one = left_by_tau2(1, played("1"));
  EXPECT_THAT(one.trajectories, HasSubstr("{\"role\":\"user\",\"content\":"));
  EXPECT_THAT(one.trajectories, Not(HasSubstr("Reason for call")));
  EXPECT_EQ(left_by_tau2(2, played("2")), one);
  auto o = played("1");
  o.resume = true;
  o.user = "scripted";
  isolated([&] {
    EXPECT_THAT(message_of<ConfigError>([&] { run_with_tau2(World::solo(), o); }),
                HasSubstr("has another run; here: --user scripted"));
  });
}

TEST(ContinualRun, PlaysTau2TasksOfAFile) {
  const Folder folder;
  make_model(folder / "model");
  const std::string path = folder / "own.json";
  write(path, R"([{"id": "a"}, {"id": "b"}, {"id": "c"}, {"id": "d"}, {"id": "e"}, {"id": "f"}])");
  auto o = with_model(folder / "model", folder / "run");
  o.env = "tau2";
  o.order = {"airline"};
  o.tasks_per_domain = 5;  // two of them are learnt from
  o.task_files["airline"] = path;
  left_by_tau2(2, o);
  std::map<std::string, std::set<std::string>> ids;  // by phase
  std::istringstream lines(contents(folder / "run/trajectories.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    const auto episode = Json::parse(line);
    ids[episode.at("phase")].insert(episode.at("id"));
  }
  EXPECT_EQ(ids["learn"], (std::set<std::string>{"a", "b"}));
  EXPECT_EQ(ids["eval"], (std::set<std::string>{"c", "d", "e"}));
  const auto said = [&] {
    return message_of<ConfigError>([&] { run_with_tau2(World::solo(), o); });
  };
  isolated([&] {
    o.resume = true;
    write(path, R"([{"id": "a"}, {"id": "b"}, {"id": "g"}])");
    EXPECT_THAT(said(), HasSubstr("has another run; here: --airline-tasks " + path));
    o.order = {"retail"};
    EXPECT_THAT(said(), HasSubstr("--airline-tasks: --order does not name airline"));
    o.env = "embedded";
    EXPECT_THAT(said(), HasSubstr("--airline-tasks needs --env tau2"));
  });
}

TEST(ContinualRun, PlaysTelecomWithoutAUser) {
  const Folder folder;
  make_model(folder / "model");
  auto o = with_model(folder / "model", folder / "run");
  o.env = "tau2";
  o.solo = true;
  o.order = {"telecom"};
  EXPECT_THAT(left_by_tau2(2, o).trajectories, HasSubstr("mend the phone"));
}

TEST(ContinualRun, EndsWhenItsEnvironmentsDie) {
  const Folder folder;
  make_model(folder / "model");
  spawn(2, [&](World& world) {
    worlds_die = world.rank() == 1;
    const auto o = with_model(folder / "model", folder / "run");
    EXPECT_THAT(message_of<Error>([&] { rl::run_continual(world, course(), o); }),
                HasSubstr("of 6 episodes died, the last one: [test] its last words"));
  });
}

TEST(ContinualRun, HasOtherWaysToLearn) {
  const Folder folder;
  auto o = options(folder / "imitates");
  o.use_grpo = false;
  const Left imitated = left_by_ranks(2, o);
  o = options(folder / "updates");
  o.updates_per_rollout = 2;
  o.drop_equal_groups = false;
  o.loss_norm = rl::LossNorm::Sequence;
  o.scale_rewards = rl::ScaleRewards::Batch;
  const Left updated = left_by_ranks(1, o);
  o.output_dir = folder / "updates2";
  EXPECT_EQ(left_by_ranks(3, o), updated);
  EXPECT_NE(imitated.fingerprint, updated.fingerprint);
}

}  // namespace
}  // namespace lockstep::test
