// Stays with a running job until nothing of it is left. The states and their bounds are in
// docs/launching.md.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <vector>

#include "launch/output.h"
#include "launch/report.h"
#include "launch/signals.h"
#include "lockstep/core/control.h"
#include "lockstep/launch/run.h"

namespace lockstep::launch {

class Supervisor {
 public:
  using Clock = std::chrono::steady_clock;

  Supervisor(const Options& options, Signals& signals, Output& output, Control& control);

  // Watches a process that has just been started.
  void watch(int rank, pid_t pid);
  // Returns the launcher's exit status when no descendant of this process is left.
  int run();
  // Kills and reaps every descendant: for a start that failed half way.
  static void end_everything();

 private:
  enum class Phase {
    Running,
    Leaving,   // every rank exited with 0, but not all the processes that they had started
    Telling,   // a rank has failed, and the others see it in the control segment
    Stopping,  // all were asked to stop
    Killing,   // all are killed
    Over,
  };
  struct Running {
    int rank;
    Clock::time_point since;
  };

  void enter(Phase phase, Clock::duration limit);
  void stop(int signal, Clock::duration limit);
  void kill_all();
  void signal_ranks(int signal) const;
  void signal_rest(int signal) const;

  void wait_for_events();
  void on_signal(int signal);
  void on_children();
  void on_deadline();
  void record(pid_t pid, int wait_status);
  int conclude();

  const Options& options_;
  Signals& signals_;
  Output& output_;
  Control& control_;

  Phase phase_ = Phase::Running;
  std::optional<Clock::time_point> deadline_;
  std::map<pid_t, Running> running_;
  std::vector<RankEnd> ends_;
  std::optional<int> cause_;       // the rank that failed first
  std::optional<int> stopped_by_;  // the signal that ended the job
  int kill_rounds_ = 0;
};

}  // namespace lockstep::launch
