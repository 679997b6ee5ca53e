#include "lockstep/rl/run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <filesystem>

#include "checkpoint_format/folder.h"
#include "lockstep/core/error.h"
#include "rl/run/files.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;
using rl::Course;
using rl::End;
using rl::Message;
using rl::Planned;
using rl::Reward;
using rl::RunOptions;
using rl::Scene;
using rl::TaskKey;
using testing::HasSubstr;

// How many more worlds may begin before this process is killed.
int worlds_left = -1;

// Hands over a ticket; who answers with an even number of bytes earns 1.
class EvenWorld : public rl::Environment {
 public:
  Scene reset(const TaskKey& key, uint64_t) override {
    if (worlds_left >= 0 && worlds_left-- == 0) raise(SIGKILL);
    return {.task = key, .ticket = "task " + key.id};
  }
  Message call(const rl::ToolCall&) override { return {.role = rl::Role::Tool, .error = true}; }
  Reward evaluate(std::span<const Message> log, End) override {
    const auto answer = std::find_if(log.begin(), log.end(), [](const Message& message) {
      return message.role == rl::Role::Assistant;
    });
    return {.value = answer != log.end() && answer->content.size() % 2 == 0 ? 1.0 : 0.0};
  }
  std::string state_hash() const override { return ""; }
};

class EvenDomain : public rl::Domain {
 public:
  explicit EvenDomain(std::string name) : name_(std::move(name)) {}
  std::string name() const override { return name_; }
  std::vector<TaskKey> tasks(std::string_view split) const override {
    std::vector<TaskKey> out;
    for (int i = 0; i < 10; ++i) out.push_back({name_, std::string(split), std::to_string(i)});
    return out;
  }
  std::unique_ptr<rl::Environment> make() const override { return std::make_unique<EvenWorld>(); }
  std::vector<rl::ToolCall> gold_calls(const TaskKey&) const override { return {}; }

 private:
  std::string name_;
};

Course course() {
  Course out{.text = rl::chat_text()};
  for (const char* name : {"even", "again"}) {
    out.arenas[name] = {std::make_shared<EvenDomain>(name),
                        [] { return std::make_unique<rl::NoUser>(); }};
  }
  out.demonstrate = [](int64_t number) {
    const std::string id = std::to_string(number % 10);
    return rl::Demonstration{.planned = {{number % 2 == 0 ? "even" : "again", "train", id}, 0},
                             .lines = {std::string(static_cast<size_t>(number % 5 + 1), 'a')}};
  };
  out.idle = {"a"};
  return out;
}

RunOptions options(const std::string& folder) {
  RunOptions o;
  o.order = {"even", "again"};
  o.tasks_per_domain = 9;
  o.learning_ratio = 0.5;
  o.eval_tasks = 3;
  o.eval_trials = 2;
  o.iterations = 2;
  o.prompts = 5;
  o.group_size = 3;
  o.replay = 0.5;
  o.max_new_tokens = 6;
  o.max_turns = 2;
  o.context = 64;
  o.warm_steps = 12;
  o.warm_batch = 3;
  o.lanes = 4;
  o.save_every = 1;
  o.cache = false;
  o.quiet = true;
  o.output_dir = folder;
  return o;
}

// The check values of docs/three_domain.md.
TEST(ContinualRun, SaysWhatWasForgotten) {
  rl::RunResult result;
  for (const auto& row :
       std::vector<std::vector<double>>{{.1, .1, .1}, {.5, .2, .1}, {.4, .6, .2}, {.3, .5, .7}}) {
    result.rows.emplace_back();
    for (const double mean : row) result.rows.back().push_back({{mean}});
  }
  const auto figures = rl::figures_of(result);
  EXPECT_NEAR(figures.at("acc"), 0.5, 1e-12);
  EXPECT_NEAR(figures.at("bwt"), -0.15, 1e-12);
  EXPECT_NEAR(figures.at("fwt"), 0.1, 1e-12);
  EXPECT_NEAR(figures.at("forgetting"), 0.15, 1e-12);
  EXPECT_NEAR(figures.at("learning_accuracy"), 0.6, 1e-12);
  result.rows.resize(2);
  for (auto& row : result.rows) row.resize(1);
  EXPECT_EQ(rl::figures_of(result).count("bwt"), 0u);
}

// What a run leaves that has to be the same on any number of ranks.
struct Left {
  std::string fingerprint, trajectories;
  bool operator==(const Left&) const = default;
};
Left left_by(const std::string& folder) {
  const std::string results = contents(folder + "/results.json");
  const size_t at = results.find("\"parameters_checksum\"");
  return {at == std::string::npos ? "none" : results.substr(at, 44),
          contents(folder + "/trajectories.jsonl")};
}

Left left_by_ranks(int ranks, const RunOptions& o) {
  spawn(ranks, [&](World& world) { rl::run_continual(world, course(), o); });
  return left_by(o.output_dir);
}

TEST(ContinualRun, LeavesTheSameBitsOnAnyNumberOfRanks) {
  const Folder folder;
  const Left one = left_by_ranks(1, options(folder / "1"));
  EXPECT_THAT(one.trajectories, HasSubstr("\"phase\":\"learn\",\"stage\":2,\"iteration\":1"));
  EXPECT_THAT(one.trajectories, HasSubstr("\"reward\":1.0"));
  EXPECT_THAT(one.trajectories, HasSubstr("\"reward\":0.0"));
  for (const int ranks : {2, 3, 4}) {
    EXPECT_EQ(left_by_ranks(ranks, options(folder / std::to_string(ranks))), one) << ranks;
  }
}

TEST(ContinualRun, LeavesEveryFile) {
  const Folder folder;
  left_by_ranks(1, options(folder / "run"));
  for (const char* name : {"curriculum.json", "results.json", "metrics.json", "trajectories.jsonl",
                           "metrics.jsonl", "report.html", "checkpoints",
                           "grpo_checkpoints/stage_1_even", "grpo_checkpoints/stage_2_again"}) {
    EXPECT_TRUE(fs::exists(folder / ("run/" + std::string(name)))) << name;
  }
}

// Killed in the warm-up, in a rollout and in an evaluation; goes on with another number of ranks.
TEST(ContinualRun, ThatWasKilledGoesOnWithTheSameBits) {
  const Folder folder;
  const Left whole = left_by_ranks(1, options(folder / "whole"));
  for (const int worlds : {620, 680, 695}) {
    auto o = options(folder / std::to_string(worlds));
    o.resume = true;  // goes on with what is there, if anything is
    spawn(1,
          [&](World& world) {
            worlds_left = worlds;
            rl::run_continual(world, course(), o);
          },
          {.doomed = {0}});
    EXPECT_EQ(left_by_ranks(2, o), whole) << worlds;
  }
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

TEST(ContinualRun, RefusesAFolderWithAnotherRun) {
  const Folder folder;
  left_by_ranks(1, options(folder / "run"));
  spawn(2, [&](World& world) {
    auto o = options(folder / "run");
    EXPECT_THAT(message_of<ConfigError>([&] { rl::run_continual(world, course(), o); }),
                HasSubstr("has a run already; --resume goes on with it"));
    o.resume = true;
    o.beta = 0.2;
    EXPECT_THAT(message_of<ConfigError>([&] { rl::run_continual(world, course(), o); }),
                HasSubstr("has another run; here: --beta 0.2"));
  });
}

TEST(ContinualRun, RefusesRanksWithOtherOptions) {
  const Folder folder;
  spawn(2, [&](World& world) {
    auto o = options(folder / "run");
    if (world.rank() == 1) o.learning_rate = 1;
    EXPECT_THAT(message_of<ConfigError>([&] { rl::run_continual(world, course(), o); }),
                HasSubstr("rank 0 has --learning-rate 0.0003, rank 1 has --learning-rate 1"));
  });
}

TEST(ContinualRun, RefusesImpossibleOptions) {
  isolated([] {
    auto o = options("/nowhere");
    const auto said = [&](auto change) {
      auto changed = o;
      change(changed);
      return message_of<ConfigError>([&] { rl::run_continual(World::solo(), course(), changed); });
    };
    EXPECT_THAT(said([](RunOptions& x) { x.order = {"moon"}; }),
                HasSubstr("--order names the domain moon; there are again, even"));
    EXPECT_THAT(said([](RunOptions& x) { x.order = {"even", "even"}; }), HasSubstr("twice"));
    EXPECT_THAT(said([](RunOptions& x) { x.replay = 1; }), HasSubstr("--replay 1"));
    EXPECT_THAT(said([](RunOptions& x) { x.temperature = 0; }), HasSubstr("--temperature"));
    EXPECT_THAT(said([](RunOptions& x) { x.output_dir = "/proc/no"; }), HasSubstr("--output-dir"));
  });
}

}  // namespace
}  // namespace lockstep::test
