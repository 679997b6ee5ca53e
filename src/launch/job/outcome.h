// How an attempt ended.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "launch/diagnosis/watch.h"

namespace lockstep::launch {

// What the launcher had done to a rank before it ended.
enum class Push {
  None,
  Asked,
  Killed,
  Interrupted,  // killed at Ctrl-C, before the time to stop was over
};

struct RankEnd {
  int rank = 0;  // of the world
  pid_t pid = 0;
  int wait_status = 0;
  std::chrono::steady_clock::duration ran{};
  Push push = Push::None;
  uint64_t at_ns = 0;      // CLOCK_MONOTONIC: when it was seen
  std::string error = {};  // in its error file, where its flight recorder holds none
};

struct Outcome {
  std::vector<RankEnd> ends;           // in the order in which they were seen
  std::optional<int> cause;            // the rank of this host that failed first
  std::optional<int> signal;           // to the launcher, which ended the attempt
  std::optional<std::string> outside;  // why another host's launcher ended it

  // Of each rank of this host, by local rank: what its flight recorder holds at the end.
  std::vector<Seen> seen = {};
  // The same when the first failure was seen, and that time; empty and 0 without one.
  std::vector<Seen> seen_first = {};
  uint64_t failed_ns = 0;
  // How many processes of this machine the kernel has ended meanwhile because memory was short;
  // nothing where it does not say.
  std::optional<int64_t> out_of_memory = {};
  // SIGUSR1, a scheduler's notice of preemption, was forwarded to the ranks.
  bool was_notified = false;
  // The cause ended with status 127 and had said that a library did not fit into its memory.
  bool could_not_map = false;

  // Where that rank died, or was when the first failure was seen; null when it gave no stack, and
  // for one that had reported its failure before and was only exiting.
  const flight::Stack* stack_of(const Seen& rank) const;

  bool succeeded() const { return !cause && !signal && !outside; }
  // Every rank of this host ended with kRequeueStatus (one at least) or 0.
  bool asks_for_requeue() const;
  // The cause had no handler for the notice, or none yet.
  bool was_killed_by_notice() const;
  // For the shell: 0; the cause's status, or 128 + its signal; kRequeueStatus;
  // exit_code_of_signal() of `signal`; 1.
  int exit_code() const;
};

// The rank whose failure came first: by the time at which it reported one itself, otherwise by the
// time at which its end was seen. Failures that a rank reported of a collective count after all
// others, since most are echoes. Nothing when none failed by itself.
std::optional<int> first_failure(const Outcome& outcome);

// The cause, and the ranks that failed without reporting an error of a collective, which is most
// often a consequence: each with its wait status. Without those that SIGKILL has ended, which comes
// from outside; none when that is the cause.
std::set<std::pair<int, int>> own_failures(const Outcome& outcome);

// Exit status 0.
bool is_success(int wait_status);
// Exit status kRequeueStatus: no failure, but the job is not finished.
bool is_requeue(int wait_status);

// The shell's number for it: the status, or 128 + the signal.
int exit_code_of(int wait_status);

// The launcher's, when this signal has ended its job: 128 + signal, but kRequeueStatus for SIGUSR1:
// a job that was preempted is to be started again later.
int exit_code_of_signal(int signal);

}  // namespace lockstep::launch
