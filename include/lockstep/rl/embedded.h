// Three small domains that need no network, no data and no other model: airline, retail, telecom.
//
// Each task has a database of its own, drawn from its number: 8 records, and 4 flights or items in
// a second table. A customer asks for something; the agent asks back, looks records up, decides by
// the policy, writes, and closes with an exact message. The reward is 1 when the database is as it
// has to be, the closing message is right, and nothing that costs money was written without the
// customer's yes; else 0. Ids and phrasings of "train", "dev" and "test" are disjoint.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/rl/environment.h"
#include "lockstep/rl/episode.h"
#include "lockstep/rl/user.h"

namespace lockstep::rl {

// Options of an EmbeddedDomain.
struct EmbeddedOptions {
  // 1: the id is always given, and the first table decides. 2: half of the customers withhold the
  // id, and the second table matters. 3: four in five withhold it, and three in ten first give one
  // that does not exist.
  int64_t difficulty = 2;
  int64_t tasks = 1024;  // of each split that tasks() lists; task() knows any number of them
};

// The names of the three.
std::span<const std::string_view> embedded_domains();

// One of the three.
class EmbeddedDomain : public Domain {
 public:
  // Throws ConfigError for another name, another difficulty or less than one task.
  explicit EmbeddedDomain(std::string_view name, EmbeddedOptions options = {});

  std::string name() const override;
  std::vector<TaskKey> tasks(std::string_view split) const override;
  std::unique_ptr<Environment> make() const override;

  // The calls of a conversation that earns 1, in their order. Throws ConfigError as reset().
  std::vector<ToolCall> gold_calls(const TaskKey& key) const override;

  // Task `index` of a split: the same on every rank and machine. `difficulty`: instead of the
  // domain's own. Throws ConfigError for another split or a negative index.
  TaskKey task(std::string_view split, int64_t index) const;
  TaskKey task(std::string_view split, int64_t index, int64_t difficulty) const;

  // What it was made with.
  const EmbeddedOptions& options() const { return options_; }

 private:
  size_t kind_;
  EmbeddedOptions options_;
};

// What fits a domain of this difficulty: 8 messages of the agent, 10 at the third.
Limits embedded_limits(int64_t difficulty = 2);

// The customer of these tasks. Begins with his request, answers questions that belong to it
// ("Which id?", "Which item?", "Which zip?", "How many GB?", "Confirm?"), and says "I do not know."
// to others. A text without a question mark ends the conversation.
class ScriptedUser : public UserSimulator {
 public:
  Message next(const Scene& scene, std::span<const Message> log, uint64_t key) override;
};

}  // namespace lockstep::rl
