// The state of running ranks as the launcher sees it: call, time in it, process state.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/flight/segment.h"

namespace lockstep::launch {

struct Seen {
  int rank = 0;  // of the world
  flight::Log log = {};
  char state = '?';  // of its process, process_state(); 'Z' when it has ended
  pid_t pid = 0;     // while it runs

  bool is_stopped() const { return state == 'T' || state == 't'; }
};

// "in all_reduce #7 ..., for 0.31 s (its process was stopped, by SIGSTOP or a debugger)"; empty
// when there is nothing to say.
std::string whereabouts(const Seen& seen, uint64_t now_ns);

// How many processes the kernel has ended so far because memory was short, on this machine or in a
// container of it; nothing where it does not say.
std::optional<int64_t> out_of_memory_kills();

// The lines of a report on a running job: where each rank is and what it has spent its time with
// since the last report, and which rank keeps the others waiting.
class Straggling {
 public:
  explicit Straggling(int ranks);
  std::vector<std::string> lines(const std::vector<Seen>& ranks);

 private:
  struct Share {
    double communication, data;
    double computing() const { return 1 - communication - data; }
  };
  Share share_of(size_t index, const Seen& seen, uint64_t now_ns) const;

  uint64_t since_ns_;
  std::vector<std::array<uint64_t, 2>> before_;  // busy_ns of each rank at since_ns_
};

}  // namespace lockstep::launch
