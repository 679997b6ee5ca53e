// Where the code of the ranks is.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/flight/segment.h"

namespace lockstep::launch {

// Asks the ranks of `pids` (by local rank) for their stacks, and returns when those that can have
// answered, or after `limit`. One that is stopped, has ended, has no handler for the signal, or has
// a debugger, which would stop it then, is not asked.
void ask_for_stacks(const flight::Segment& flight, const std::map<int, pid_t>& pids,
                    std::chrono::milliseconds limit);

// The functions of some stacks; reads the tables of each program and library once.
class StackNames {
 public:
  explicit StackNames(const std::vector<const flight::Stack*>& stacks);

  // One line for each frame, from the innermost: "train(long) (fault_trainer+0x1234)". Ends after
  // main(): what is further out started the program.
  std::vector<std::string> frames(const flight::Stack& stack) const;

  // All of it on one line, without arguments: "Channel::wait < Group::barrier < train < main"; of a
  // deep one the middle is left out.
  std::string chain(const flight::Stack& stack) const;

 private:
  std::map<std::pair<std::string, uint64_t>, std::string> names_;  // by module and offset
};

}  // namespace lockstep::launch
