// Ends what a killed launcher leaves behind.
#pragma once

#include <sys/types.h>

#include <string>

#include "core/files/fd.h"

namespace lockstep::launch {

// A process that does nothing while its launcher lives. When the launcher is killed, the kernel
// ends the ranks, and this process everything that they have started: all processes with the
// launcher's mark in their environment. It is not a descendant for launch/process/descendants.h,
// and waitpid(-1) does not see it.
class OrphanReaper {
 public:
  static constexpr const char* kVariable = "LOCKSTEP_JOB";

  // `mark`: the variable's value, which no other job of this machine has. When no process can be
  // started there is no orphan reaper, and nothing else changes.
  explicit OrphanReaper(const std::string& mark);
  ~OrphanReaper();
  OrphanReaper(const OrphanReaper&) = delete;
  OrphanReaper& operator=(const OrphanReaper&) = delete;

 private:
  pid_t pid_ = -1;
  Fd alive_;  // closed when the launcher ends, in any way
};

}  // namespace lockstep::launch
