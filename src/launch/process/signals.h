// The signals that reach a launcher, as readable events.
#pragma once

#include <chrono>
#include <csignal>
#include <optional>
#include <string>

#include "core/files/fd.h"

namespace lockstep::launch {

// "SIGTERM"
std::string signal_name(int number);

// While it lives, the signals that stop or tell a job are read from fd() and do nothing else, and
// writing to a closed pipe, or beyond RLIMIT_FSIZE, is an error and no signal. One that was ignored
// when the launcher was started (nohup) stays ignored. SIGINTs within 0.2 s are one: a
// wrapper such as timeout(1) passes its own on. So are those that have come by the time the first
// has been acted upon, which takes longer than that on a busy machine.
class Signals {
 public:
  Signals();
  ~Signals() { restore(); }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  int fd() const { return fd_.get(); }
  // The next one that waits; nothing when none does.
  std::optional<int> next();
  // The signal handling from before; also for a child between fork() and execve().
  void restore() const;

 private:
  using Clock = std::chrono::steady_clock;

  std::optional<Clock::time_point> pressed_;  // when the last SIGINT came that next() returned
  bool none_since_ = false;                   // next() has returned nothing after that
  sigset_t mask_before_;
  struct sigaction pipe_before_, size_before_, child_before_;
  Fd fd_;
};

}  // namespace lockstep::launch
