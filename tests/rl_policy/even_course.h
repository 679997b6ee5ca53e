// A course that takes seconds, and what a run of it leaves.
#pragma once

#include <algorithm>
#include <atomic>
#include <csignal>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/rl/run.h"
#include "support/folder.h"
#include "support/spawn.h"

namespace lockstep::test {

using rl::Course;
using rl::End;
using rl::Message;
using rl::Reward;
using rl::RunOptions;
using rl::Scene;
using rl::TaskKey;

// How many more worlds may begin before this process is killed.
inline std::atomic<int> worlds_left = -1;
// Called when a world begins.
inline std::function<void()> on_world = [] {};
// Whether each world dies as soon as it begins.
inline bool worlds_die = false;

// Hands over a ticket; who answers with an even number of bytes earns 1.
class EvenWorld : public rl::Environment {
 public:
  Scene reset(const TaskKey& key, uint64_t) override {
    on_world();
    if (worlds_left >= 0 && worlds_left-- == 0) raise(SIGKILL);
    if (worlds_die) throw rl::EnvironmentError("[test] its last words");
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

inline Course course() {
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
  out.easier = [](TaskKey key) {
    key.id += "@1";
    return key;
  };
  out.idle = {"a"};
  return out;
}

inline RunOptions options(const std::string& folder) {
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

// What a run leaves that has to be the same on any number of ranks.
struct Left {
  std::string fingerprint, trajectories, metrics;
  bool operator==(const Left&) const = default;
};
inline Left left_by(const std::string& folder) {
  const std::string results = contents(folder + "/results.json");
  const size_t at = results.find("\"parameters_checksum\"");
  return {at == std::string::npos ? "none" : results.substr(at, 44),
          contents(folder + "/trajectories.jsonl"), contents(folder + "/metrics.json")};
}

inline Left left_by_ranks(const Ranks& ranks, const RunOptions& o) {
  spawn(ranks, [&](World& world) { rl::run_continual(world, course(), o); });
  return left_by(o.output_dir);
}
inline Left left_by_ranks(int ranks, const RunOptions& o) {
  return left_by_ranks(Ranks{"auto", ranks}, o);
}

}  // namespace lockstep::test
