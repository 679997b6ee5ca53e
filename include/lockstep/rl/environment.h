// Worlds in which an agent serves customers with tools: what is asked, what it may do, what counts.
// None of it uses torch or communicates; a rank runs as many as it likes, in one thread.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/rl/message.h"

namespace lockstep::rl {

// Names a task. An id alone names none: domains use the same ids.
struct TaskKey {
  std::string domain;  // "airline", "retail", "telecom"
  std::string split;   // "train", "dev", "test"
  std::string id;

  // By domain, then split, then id, as texts.
  auto operator<=>(const TaskKey&) const = default;
};

// "airline/train/17"
std::string name_of(const TaskKey& key);

// What a task begins with.
struct Scene {
  TaskKey task = {};
  std::string policy = "";              // what the agent is told to do
  std::string scenario = "";            // what the user knows and wants; the agent never sees it
  std::string guidelines = "";          // how a model has to play the user; nor this
  std::string ticket = "";              // of an episode without a user: what is to be done
  std::vector<std::string> tools = {};  // each the JSON text of a function's schema, as OpenAI's
  std::vector<std::string> user_tools = {};  // the user's, in the same form
  std::string stop_tool = "";                // a call of it ends the episode; empty: there is none
  std::vector<Message> history = {};         // what was said before the episode begins
};

// How an episode ended.
enum class End {
  None,         // it continues
  AgentStop,    // the agent ended it
  UserStop,     // the user ended it
  MaxTurns,     // too many messages of the agent
  MaxErrors,    // too many calls that failed
  BadCall,      // a malformed message
  TooLong,      // a message of the agent had too many tokens
  ContextFull,  // the conversation had too many tokens
  EnvError,     // the environment died; says nothing of the agent
};

// "user_stop"
std::string_view name_of(End why);

// What an episode earned.
struct Reward {
  double value = 0;                          // in [0, 1]
  std::map<std::string, double> parts = {};  // by component, each in [0, 1]
  std::string note = "";                     // why, where it is not obvious
};

// An environment died, or gave no answer in time. An Episode makes End::EnvError of it.
class EnvironmentError : public Error {
 public:
  using Error::Error;
};

// One live world. Not thread-safe. All members may throw EnvironmentError.
class Environment {
 public:
  virtual ~Environment() = default;

  // Begins a task. The same key and seed give the same world on every rank and machine. An Episode
  // sets Scene::task. Throws ConfigError for a key that the domain does not have.
  virtual Scene reset(const TaskKey& key, uint64_t seed) = 0;

  // The tool's message, of which an Episode reads content and error alone. What is wrong with a
  // call is its content, and `error` is set; such a call changes nothing.
  virtual Message call(const ToolCall& call) = 0;

  // What the episode earned that ended so. `log`: all messages after Scene::history.
  virtual Reward evaluate(std::span<const Message> log, End why) = 0;

  // SHA-256 of what the world has become, as 64 hexadecimal digits.
  virtual std::string state_hash() const = 0;
};

// Tasks of one kind, and the worlds that they are played in. Immutable; any thread may use it.
class Domain {
 public:
  virtual ~Domain() = default;

  // "airline"
  virtual std::string name() const = 0;

  // The tasks of "train", "dev", "test" or "all", always in the same order. Throws ConfigError for
  // another name.
  virtual std::vector<TaskKey> tasks(std::string_view split) const = 0;

  // A world for any of its tasks, one after another. It may outlive the domain.
  virtual std::unique_ptr<Environment> make() const = 0;

  // The calls, in their order, by which a task is solved: what scores of single tools compare with.
  // Throws ConfigError for a key that the domain does not have.
  virtual std::vector<ToolCall> gold_calls(const TaskKey& key) const = 0;
};

}  // namespace lockstep::rl
