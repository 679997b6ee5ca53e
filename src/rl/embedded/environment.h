// The embedded domains' world.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "lockstep/rl/environment.h"
#include "rl/embedded/task.h"

namespace lockstep::rl::embedded {

class EmbeddedEnvironment : public Environment {
 public:
  EmbeddedEnvironment(Kind kind, int64_t difficulty) : kind_(kind), difficulty_(difficulty) {}

  Scene reset(const TaskKey& key, uint64_t seed) override;
  Message call(const ToolCall& call) override;
  Reward evaluate(std::span<const Message> log, End why) override;
  std::string state_hash() const override;

  const Task& task() const { return task_; }

 private:
  Kind kind_;
  int64_t difficulty_;
  Task task_;
  World world_;
  bool looked_up_ = false;
};

}  // namespace lockstep::rl::embedded
