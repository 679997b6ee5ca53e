// How a job that did not end well ended: the cause first, then what the others did.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::launch {

// What the launcher had done to a rank before it ended.
enum class Push { None, Asked, Killed };

struct RankEnd {
  int rank = 0;
  pid_t pid = 0;
  int wait_status = 0;
  std::chrono::steady_clock::duration ran{};
  Push push = Push::None;
};

// Exit status 0.
bool is_success(int wait_status);

// The shell's number for it: the status, or 128 + the signal.
int exit_code_of(int wait_status);

// The lines of the report. `cause` is the first failure; without one `signal` is what stopped the
// job.
std::vector<std::string> report(const std::vector<RankEnd>& ends, std::optional<int> cause,
                                std::optional<int> signal);

}  // namespace lockstep::launch
