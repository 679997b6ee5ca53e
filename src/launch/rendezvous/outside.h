// The interface to the launchers of other hosts while ranks run.
#pragma once

#include <poll.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "launch/job/outcome.h"

namespace lockstep::launch {

// Called from the worker group's loop, on its only thread. None of it may wait.
class Outside {
 public:
  // Ends the attempt here, too.
  struct Order {
    std::string why;
    // Handed on to the ranks, which may take their time; 0 after a failure elsewhere, which the
    // ranks see in the control segment before they are stopped. SIGKILL: at once, even if they are
    // being stopped already.
    int signal = 0;
  };

  using Clock = std::chrono::steady_clock;

  virtual ~Outside() = default;
  // Adds what poll() has to wait for. Returns when attend() is to be called at the latest.
  virtual std::optional<Clock::time_point> await(std::vector<pollfd>& events) = 0;
  // After each poll(), whatever its result.
  virtual std::optional<Order> attend() = 0;
  // The longest pause between calls after which no other launcher takes this one for lost.
  virtual std::chrono::milliseconds patience() const = 0;
  // A rank of this host is the first to fail; the other ranks of this host have just been told.
  virtual void on_failure(const RankEnd& end) = 0;
  // A rank of this host does not move: SIGSTOP, or a debugger.
  virtual void on_stopped(int rank, int pid) = 0;
  // A signal to this launcher ends the attempt; the ranks of this host have just been asked.
  // SIGUSR1 may end it: they go on, or end by themselves.
  virtual void on_signal(int signal) = 0;
  // Another one, after on_signal(): the ranks of this host have just been killed.
  virtual void on_kill() = 0;
};

}  // namespace lockstep::launch
