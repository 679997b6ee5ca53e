// Ends what a killed launcher leaves behind.
#pragma once

#include <sys/types.h>

#include <string>

#include "core/fd.h"

namespace lockstep::launch {

// A process that does nothing while its launcher lives. When the launcher is killed, the kernel
// ends the ranks, and this process everything that they have started: whatever has the launcher's
// mark in its environment. It is no descendant for launch/process/descendants.h, and waitpid(-1)
// does not see it.
class OrphanReaper {
 public:
  static constexpr const char* kVariable = "LOCKSTEP_JOB";

  // `mark`: the variable's value, which no other job of this machine has. Without a process to
  // spare there is no orphan reaper, and nothing else changes.
  explicit OrphanReaper(const std::string& mark);
  ~OrphanReaper();
  OrphanReaper(const OrphanReaper&) = delete;
  OrphanReaper& operator=(const OrphanReaper&) = delete;

 private:
  pid_t pid_ = -1;
  Fd alive_;  // closed by the launcher's end, whatever that is
};

}  // namespace lockstep::launch
