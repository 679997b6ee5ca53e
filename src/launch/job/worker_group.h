// Supervises a running job until none of its processes is left. The states and their bounds are in
// docs/launching_protocol.md.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "core/control.h"
#include "core/flight/segment.h"
#include "launch/diagnosis/watch.h"
#include "launch/job/outcome.h"
#include "launch/job/plan.h"
#include "launch/job/session.h"
#include "launch/process/descendants.h"
#include "launch/rendezvous/outside.h"

namespace lockstep::launch {

class WorkerGroup {
 public:
  using Clock = std::chrono::steady_clock;

  // Everything given must outlive it; `outside` may be null.
  WorkerGroup(Session& session, const Plan& plan, Control& control, const flight::Segment& flight,
              Outside* outside);

  // Watches a process that has just been started. `starting`: child.h.
  void watch(int local_rank, pid_t pid, Fd starting);
  // Returns when no descendant of this process is left and everything is reported. Throws
  // StartError when a rank cannot execute the program, and leaves the others running then.
  Outcome run();
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
    int local_rank;
    Clock::time_point since;
    Fd starting;  // until it has executed the program
    bool is_stopped = false, is_said = false;
  };

  void enter(Phase phase, Clock::duration limit);
  void stop(int signal, Clock::duration limit);
  void kill_all(Push push);
  void signal_ranks(int signal) const;
  void signal_rest(const std::vector<ProcessStat>& all, int signal) const;

  void wait_for_events();
  void attend_outside();
  void on_signal(int signal);
  void check_starts();
  void on_children();
  void on_deadline();
  void record(pid_t pid, int wait_status);
  void conclude();
  // The rank's own: `started`, or, where that is a script, timeout, strace or gdb, one below it.
  pid_t process_of(int local_rank, pid_t started) const;
  std::vector<Seen> look() const;
  // The same, with the stacks of those that answer within the time.
  std::vector<Seen> ask(std::chrono::milliseconds limit) const;
  void say_where_ranks_are();
  void say_of_leftovers(std::string_view what);
  void look_for_absent();

  Session& session_;
  const Options& options_;
  Signals& signals_;
  LogMultiplexer& output_;
  const int first_rank_, ranks_, restarts_;
  Control& control_;
  const flight::Segment& flight_;
  Straggling straggling_;
  Outside* const outside_;

  Phase phase_ = Phase::Running;
  std::optional<Clock::time_point> deadline_;
  std::map<pid_t, Running> running_;
  Outcome outcome_;
  const std::optional<int64_t> out_of_memory_before_ = out_of_memory_kills();
  Push killed_by_ = Push::Killed;
  int kill_rounds_ = 0;
  Clock::time_point next_look_ = Clock::now();
  bool has_leftovers_ =
      false;  // the ranks have exited with 0, and what they left was asked to stop
  bool said_missing_ = false;
};

}  // namespace lockstep::launch
