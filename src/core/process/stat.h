// A process's state, from /proc.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

struct ProcessStat {
  pid_t pid = 0;
  std::string name;      // the program's choice: it may hold anything
  char state = 0;        // R, S, D, Z, T, ...
  uint32_t flags = 0;    // the kernel's PF_...
  uint32_t pending = 0;  // signals that its first thread has not taken yet, a bit each
  pid_t parent = 0;
  pid_t group = 0;
  uint64_t start = 0;  // with the pid it identifies one process
  // The state is 'Z', but of the main thread alone (pthread_exit() of main): others still run.
  bool has_lost_main = false;

  // By SIGSTOP, or by a debugger.
  bool is_stopped() const { return state == 'T' || state == 't'; }
  // It runs none of its own code any more, but may not have closed its files.
  bool is_ending() const;
};

// From /proc/PID/stat; nothing when there is no such process.
std::optional<ProcessStat> process_stat(pid_t pid);

// From /proc/PID/task/*/stat, the process's first thread first; `pid` is the thread's.
std::vector<ProcessStat> thread_stats(pid_t pid);

// The debugger that traces it, until whose wait() or end a process that was killed stays; 0 when
// there is none.
pid_t tracer_of(pid_t pid);

}  // namespace lockstep
