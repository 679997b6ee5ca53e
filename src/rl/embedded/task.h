// One task: a world, a user with a request, and how it has to end.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/rl/message.h"
#include "rl/embedded/policy.h"
#include "rl/embedded/world.h"

namespace lockstep::rl::embedded {

// Which task.
struct TaskNumber {
  Kind kind = Kind::Airline;
  Split split = Split::Train;
  int64_t index = 0;
  int64_t level = 2;  // of difficulty
};

struct Task {
  TaskNumber number;
  const RequestKind* kind = nullptr;
  const Clause* clause = nullptr;
  World world;
  int wanted = 0;        // Exchange: the wanted item
  std::string argument;  // what the user adds to his request: bags, cabin, item, zip, GB
  bool consents = false;
  bool withholds = false;  // the id is told when it is asked for
  int wrong_id = 0;        // told first; 0: none
  std::string request;     // the user's first message

  const Record& record() const { return world.records.front(); }
  // The record's second table, or the wanted item; none in telecom.
  const Second* second() const;
};

// A pure function of its argument, on every machine.
Task make_task(const TaskNumber& number);

// The exact text that closes a conversation which comes to `outcome`.
std::string closing(const Task& task, Outcome outcome);

// What the user would know: lines of "name: value", which user.cpp reads.
std::string scenario_of(const Task& task);

// What an agent says to bring a conversation to `outcome`.
enum class Looks {
  AsNeeded,  // into the second table where the first does not decide
  Contrary,  // the other way round
};
std::vector<std::string> script(const Task& task, Outcome outcome, Looks looks);

// The write that `outcome` needs; its name is empty when there is none.
ToolCall write_of(const Task& task, Outcome outcome);

// A call as an agent writes it.
std::string call_text(std::string_view name, std::string_view arguments);

}  // namespace lockstep::rl::embedded
