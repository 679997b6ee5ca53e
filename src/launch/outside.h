// What a launcher attends to while its ranks run, beside them: the launchers of other hosts.
#pragma once

#include <poll.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "launch/outcome.h"

namespace lockstep::launch {

// Called from the supervisor's loop, on its only thread. None of it may wait.
class Outside {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~Outside() = default;
  // Adds what poll() has to wait for. Returns when attend() is to be called at the latest.
  virtual std::optional<Clock::time_point> await(std::vector<pollfd>& events) = 0;
  // After each poll(), whatever it woke up for. A text ends the incarnation here, too: the ranks
  // see it in the control segment and are stopped as after a failure.
  virtual std::optional<std::string> attend() = 0;
  // A rank of this host is the first to fail; the other ranks of this host have just been told.
  virtual void on_failure(const RankEnd& end) = 0;
};

}  // namespace lockstep::launch
