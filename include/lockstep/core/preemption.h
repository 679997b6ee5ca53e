// A scheduler's notice that it is about to end this job.
#pragma once

#include <csignal>
#include <initializer_list>
#include <map>
#include <optional>

#include "lockstep/core/compiler.h"

namespace lockstep {

// The exit status of a program that has saved and wants to be started again: EX_TEMPFAIL of
// sysexits.h. `lockstep run` lets the other ranks end by themselves, starts none again, and ends
// with this status when all its ranks have ended with it or with 0. A batch script then requeues
// the job (examples/launch/slurm.sh).
inline constexpr int kRequeueStatus = 75;

// While it exists, the given signals are recorded and do not end the process: a program polls it
// once per step, saves, and ends by itself. Slurm sends SIGUSR1 before the time limit with
// `--signal=USR1@60` (up to a minute earlier than that) and SIGTERM when it takes the nodes away;
// Kubernetes sends SIGTERM; `lockstep run` passes both on to every rank. The ranks receive it at
// slightly different times, and some not at all: agree on the step before acting.
//
//   if (any_rank(notice.received(), world)) {  // every rank, in every step
//     checkpoints.save(step);
//     checkpoints.finish();
//     return kRequeueStatus;
//   }
//
// One at a time in a process. Where the thread that constructs it has the signals blocked, as it
// may from what has started the program, it has them unblocked meanwhile. The destructor restores
// the handling from before, except for a signal that was received and would now end the process:
// that one is ignored from then on, since the same signal may come twice (Slurm signals every
// process of a step, including the launcher) while a program that has saved is on its way out. Safe
// to poll from any thread. Throws ConfigError when there is one already, or for a signal that
// cannot be handled.
class PreemptionNotice {
 public:
  // Handles these signals from now on.
  explicit PreemptionNotice(std::initializer_list<int> numbers = {SIGUSR1, SIGTERM});
  ~PreemptionNotice();
  PreemptionNotice(const PreemptionNotice&) = delete;
  PreemptionNotice& operator=(const PreemptionNotice&) = delete;

  // The last of the signals that has come; nothing until one has. One relaxed load.
  std::optional<int> signal() const noexcept;
  bool received() const noexcept { return signal().has_value(); }

 private:
  void restore() noexcept;
  std::map<int, struct sigaction> before_;
  sigset_t blocked_;  // of them, in the thread that constructs it
};

}  // namespace lockstep
