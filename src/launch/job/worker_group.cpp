#include "launch/job/worker_group.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/wait.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/process/stat.h"
#include "launch/diagnosis/failure_summary.h"
#include "launch/diagnosis/stacks.h"
#include "launch/output/last_words.h"
#include "launch/process/child.h"

namespace lockstep::launch {
namespace {

using namespace std::chrono_literals;

// Time for the other ranks to notice a failure by themselves and to report what they were doing;
// they collect each other's status for up to 0.3 s.
constexpr auto kTelling = 800ms;
// With kTelling before it a job is over 2.3 s after a failure, and within the promised 3 s on a
// busy machine.
constexpr auto kGraceAfterFailure = 1500ms;
constexpr auto kGraceAfterSignal = 10'000ms;
// Ranks say where they are within a millisecond or two. After a failure the others are told after
// that, and have to know within 0.5 s.
constexpr auto kAnswerAfterFailure = 300ms;
// Between two rounds of SIGKILL, which only a process in the middle of a fork() can outlive, and
// how many there are at most: a process that the kernel holds in an uninterruptible wait does not
// die at all.
constexpr auto kKillRound = 100ms;
constexpr int kKillRounds = 20;

}  // namespace

WorkerGroup::WorkerGroup(Session& session, const Plan& plan, Control& control,
                         const flight::Segment& flight, Outside* outside)
    : session_(session),
      options_(session.options),
      signals_(session.signals),
      output_(session.output),
      first_rank_(plan.first_rank),
      ranks_(plan.local_ranks),
      restarts_(plan.restarts),
      control_(control),
      flight_(flight),
      straggling_(plan.local_ranks),
      outside_(outside) {}

void WorkerGroup::watch(int local_rank, pid_t pid, Fd starting) {
  running_.emplace(pid, Running{local_rank, Clock::now(), std::move(starting)});
}

void WorkerGroup::check_starts() {
  for (auto& [pid, rank] : running_) {
    if (rank.starting && has_started(rank.starting, session_.program)) rank.starting.reset();
  }
}

Outcome WorkerGroup::run() {
  while (phase_ != Phase::Over) {
    wait_for_events();
    output_.pump();
    bool children = false;
    while (const auto signal = signals_.next()) {
      if (*signal == SIGCHLD) {
        children = true;
      } else {
        on_signal(*signal);
      }
    }
    check_starts();  // those that could not have ended, too, and are not failed ranks
    if (children) on_children();
    if (outside_ != nullptr) attend_outside();
    if (output_.is_abandoned() && phase_ == Phase::Running) {
      outcome_.signal = SIGPIPE;
      stop(SIGTERM, options_.grace.value_or(kGraceAfterFailure));
    }
    if (phase_ == Phase::Running && Clock::now() >= next_look_) look_for_absent();
    if (deadline_ && Clock::now() >= *deadline_) on_deadline();
  }
  conclude();
  return outcome_;
}

void WorkerGroup::wait_for_events() {
  std::vector<pollfd> events = {{signals_.fd(), POLLIN, 0}};
  output_.await(events);
  for (const auto& [pid, rank] : running_) {
    if (rank.starting) events.push_back({rank.starting.get(), POLLIN, 0});
  }
  std::optional<Clock::time_point> until = deadline_;
  if (phase_ == Phase::Running) until = next_look_;
  if (outside_ != nullptr) {
    const auto call = outside_->await(events);
    if (call && (!until || *call < *until)) until = call;
  }
  int timeout = -1;
  if (until) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(*until - Clock::now());
    timeout = static_cast<int>(std::max<int64_t>(0, left.count()));
  }
  poll(events.data(), events.size(), timeout);
}

void WorkerGroup::attend_outside() {
  const auto order = outside_->attend();
  if (!order || phase_ == Phase::Over) return;
  if (order->signal == SIGKILL) {
    if (phase_ == Phase::Running) outcome_.outside = order->why;
    if (phase_ != Phase::Killing) output_.say(order->why);
    return kill_all(Push::Interrupted);
  }
  if (phase_ == Phase::Stopping && order->signal == 0) {
    // Other launchers expect the ranks to end within the time after a failure, though a signal
    // allows more.
    const auto limit = Clock::now() + options_.grace.value_or(kGraceAfterFailure);
    deadline_ = std::min(*deadline_, limit);
  }
  if (phase_ != Phase::Running && phase_ != Phase::Leaving) return;
  outcome_.outside = order->why;
  if (order->signal != 0) return stop(order->signal, options_.grace.value_or(kGraceAfterSignal));
  // No rank is left to be told, and the others do not wait for what these have left running.
  if (phase_ == Phase::Leaving) return stop(SIGTERM, options_.grace.value_or(kGraceAfterFailure));
  control_.explain(order->why);
  control_.report_failure();
  enter(Phase::Telling, kTelling);
}

void WorkerGroup::enter(Phase phase, Clock::duration limit) {
  phase_ = phase;
  deadline_ = Clock::now() + limit;
}

void WorkerGroup::stop(int signal, Clock::duration limit) {
  enter(Phase::Stopping, limit);
  signal_ranks(signal);
  const auto all = descendants();
  signal_rest(all, signal);
  // One that is stopped would not see it before it is too late. The others are left alone: SIGCONT
  // takes away the SIGSTOP by which a debugger, or a leak check at a process's end, waits to
  // attach.
  for (const ProcessStat& process : all) {
    if (process.state == 'T') kill(process.pid, SIGCONT);
  }
}

void WorkerGroup::kill_all(Push push) {
  if (phase_ != Phase::Killing) killed_by_ = push;
  enter(Phase::Killing, kKillRound);
  signal_ranks(SIGKILL);
  signal_rest(descendants(), SIGKILL);
}

void WorkerGroup::signal_ranks(int signal) const {
  for (const auto& [pid, rank] : running_) {
    // One that has not made its group yet (child.cpp) takes it when it has restored its mask.
    if (kill(-pid, signal) != 0) kill(pid, signal);
  }
}

// Those of `all` descendants that have left the ranks' process groups, or outlived their rank.
void WorkerGroup::signal_rest(const std::vector<ProcessStat>& all, int signal) const {
  for (const ProcessStat& process : all) {
    const bool is_told = running_.contains(process.group) || running_.contains(process.pid);
    if (!is_told) kill(process.pid, signal);
  }
}

void WorkerGroup::on_signal(int signal) {
  switch (signal) {
    case SIGUSR1:
      signal_ranks(signal);
      outcome_.was_notified = true;
      if (phase_ == Phase::Running && outside_ != nullptr) outside_->on_signal(signal);
      if (phase_ == Phase::Running || phase_ == Phase::Leaving || has_leftovers_) return;
      if (outcome_.cause && options_.max_restarts == 0) return;
      break;  // the ranks are being stopped, and would be started again
    case SIGUSR2:
    case SIGQUIT:
      return say_where_ranks_are();
    case SIGTSTP:
      // The terminal's Ctrl-Z reaches only the launcher. It continues in the next line when the
      // shell lets it.
      signal_ranks(SIGSTOP);
      raise(SIGSTOP);
      return signal_ranks(SIGCONT);
    default:
      break;
  }
  const bool is_first = !outcome_.signal;
  if (is_first) outcome_.signal = signal;
  if (phase_ == Phase::Running || phase_ == Phase::Leaving) {
    const auto grace = options_.grace.value_or(kGraceAfterSignal);
    output_.say(fmt::format("{}: asking {} rank{} to stop; killing {} after {:g} s (Ctrl-C: now)",
                            signal_name(signal), running_.size(), running_.size() == 1 ? "" : "s",
                            running_.size() == 1 ? "it" : "them",
                            std::chrono::duration<double>(grace).count()));
    stop(signal, grace);
  } else {
    // The ranks are being stopped already; what the signal changes is that none are started again.
    if (is_first) output_.say(fmt::format("{}: no rank is started again", signal_name(signal)));
    if (signal == SIGINT) kill_all(Push::Interrupted);
  }
  if (outside_ == nullptr) return;
  if (is_first) outside_->on_signal(signal);
  if (signal == SIGINT && phase_ == Phase::Killing) outside_->on_kill();
}

void WorkerGroup::on_children() {
  std::vector<std::pair<pid_t, int>> ended;
  int status = 0;
  pid_t pid;
  while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
    if (running_.contains(pid)) ended.emplace_back(pid, status);
  }
  const bool nobody_left = pid < 0;
  // Of two that ended since the last look, the killed one is the cause and the other's exit its
  // echo.
  std::stable_sort(ended.begin(), ended.end(), [](const auto& a, const auto& b) {
    return WIFSIGNALED(a.second) && !WIFSIGNALED(b.second);
  });
  for (const auto& [one, its_status] : ended) record(one, its_status);

  // What was there before us may outlive the job.
  if (nobody_left || (running_.empty() && descendants().empty())) {
    phase_ = Phase::Over;
  } else if (phase_ == Phase::Killing) {
    // An orphan of the one that has just ended may be new among our children.
    signal_rest(descendants(), SIGKILL);
  } else if (running_.empty() && phase_ == Phase::Running) {
    enter(Phase::Leaving, options_.grace.value_or(kGraceAfterFailure));
  } else if (running_.empty() && phase_ == Phase::Telling) {
    stop(SIGTERM, options_.grace.value_or(kGraceAfterFailure));
  }
}

void WorkerGroup::record(pid_t pid, int wait_status) {
  // It may have failed to start since the last look.
  const Fd& starting = running_.at(pid).starting;
  if (starting) static_cast<void>(has_started(starting, session_.program));
  const auto node = running_.extract(pid);
  const Running& ended = node.mapped();
  const int local_rank = ended.local_rank;
  control_.record_exit(local_rank, wait_status);
  const Push push = phase_ == Phase::Killing    ? killed_by_
                    : phase_ == Phase::Stopping ? Push::Asked
                                                : Push::None;
  outcome_.ends.push_back({.rank = first_rank_ + local_rank,
                           .pid = pid,
                           .wait_status = wait_status,
                           .ran = Clock::now() - ended.since,
                           .push = push,
                           .at_ns = flight::now_ns()});
  if (is_success(wait_status) || is_requeue(wait_status)) return;
  if (phase_ == Phase::Running) {
    outcome_.cause = outcome_.ends.back().rank;
    outcome_.failed_ns = outcome_.ends.back().at_ns;
    // Before the ranks are told of the failure, and leave.
    outcome_.seen_first = ask(kAnswerAfterFailure);
  }
  control_.report_failure();
  if (phase_ == Phase::Running) {
    enter(Phase::Telling, kTelling);
    if (outside_ != nullptr) outside_->on_failure(outcome_.ends.back());
  }
}

void WorkerGroup::on_deadline() {
  switch (phase_) {
    case Phase::Telling:
      return stop(SIGTERM, options_.grace.value_or(kGraceAfterFailure));
    case Phase::Leaving:
      say_of_leftovers("the ranks have exited and left processes running, which are asked to stop");
      has_leftovers_ = true;
      return stop(SIGTERM, options_.grace.value_or(kGraceAfterSignal));
    case Phase::Stopping:
      if (has_leftovers_) say_of_leftovers("killed, since they do not stop");
      return kill_all(Push::Killed);
    case Phase::Killing:
      if (++kill_rounds_ < kKillRounds) return kill_all(Push::Killed);
      for (const ProcessStat& process : descendants()) {
        const pid_t tracer = tracer_of(process.pid);
        output_.say(fmt::format(
            "process {} (state {}) does not end after SIGKILL: {}", process.pid, process.state,
            tracer != 0 ? fmt::format("process {}, a debugger or tracer, holds it", tracer)
                        : "the kernel waits for a device or a network file system"));
      }
      phase_ = Phase::Over;
      return;
    case Phase::Running:
    case Phase::Over:
      return;
  }
}

void WorkerGroup::conclude() {
  output_.finish();
  outcome_.seen = look();
  if (outcome_.cause) outcome_.cause = first_failure(outcome_);
  // Then the notice has ended the attempt, as if the launcher had been asked to end.
  if (outcome_.was_killed_by_notice() && options_.max_restarts > 0 && !outcome_.signal) {
    outcome_.signal = SIGUSR1;
  }
  const auto out_of_memory = out_of_memory_kills();
  if (out_of_memory && out_of_memory_before_) {
    outcome_.out_of_memory = *out_of_memory - *out_of_memory_before_;
  }
  const LastWords words(session_, first_rank_, restarts_);
  for (RankEnd& end : outcome_.ends) {
    const Seen& seen = outcome_.seen[static_cast<size_t>(end.rank - first_rank_)];
    const bool is_fine = is_success(end.wait_status) || is_requeue(end.wait_status);
    const bool by_itself = end.push == Push::None && !is_fine;
    if (by_itself && !seen.log.failure) end.error = words.error_of(end.rank);
  }
  if (outcome_.cause && outcome_.exit_code() == 127) {  // of the dynamic linker, most often
    const std::string last = words.of(*outcome_.cause);
    outcome_.could_not_map = last.find("failed to map segment") != std::string::npos ||
                             last.find("allocate memory") != std::string::npos;
  }
  for (const std::string& line : report(outcome_)) output_.say(line);
  if (outcome_.cause) {
    for (const std::string& line : words.unseen(*outcome_.cause)) output_.say(line);
    const bool is_port_taken =  // by torch's store
        *outcome_.cause == 0 &&
        words.of(0).find("server socket has failed to listen") != std::string::npos;
    if (is_port_taken && !session_.rank_0_binds_port) {
      output_.say(
          "hint: rank 0 has inherited a socket that listens at MASTER_PORT; a program that binds "
          "the port itself, such as a script that runs Python, needs LOCKSTEP_PYTHON_PEERS=1");
    }
    if (session_.logs.is_on()) words.write_failure_report(outcome_, output_);
  }
  output_.pump();
}

void WorkerGroup::end_everything() {
  for (;;) {
    const auto all = descendants();
    if (all.empty()) return;
    for (const ProcessStat& process : all) kill(process.pid, SIGKILL);
    if (waitpid(-1, nullptr, 0) < 0) return;
  }
}

}  // namespace lockstep::launch
