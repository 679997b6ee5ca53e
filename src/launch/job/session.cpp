#include "launch/job/session.h"

#include <fmt/format.h>

#include <limits>
#include <utility>
#include <vector>

#include "core/process/descriptors.h"
#include "core/process/standard_streams.h"
#include "launch/job/late.h"
#include "launch/job/program.h"
#include "launch/process/descendants.h"
#include "launch/process/environment.h"
#include "lockstep/core/environment.h"

namespace lockstep::launch {
namespace {

constexpr std::chrono::milliseconds kFlushAfterSignal{1000};

std::chrono::milliseconds flush_time() {
  return std::chrono::seconds(env_int("LOCKSTEP_OUTPUT_TIMEOUT", 1, 1'000'000).value_or(60));
}

void check_local_rank(std::string_view flag, int local_rank, const Options& options) {
  if (local_rank < options.ranks) return;
  throw ConfigError(fmt::format("[run] {}: there is no local rank {}; this host has 0 to {}", flag,
                                local_rank, options.ranks - 1));
}

Options completed(Options options) {
  check(options);
  open_standard_streams();
  leave_out_present();
  raise_descriptor_limit();
  static_cast<void>(flush_time());  // a wrong value is an error now
  static_cast<void>(late_after());
  static_cast<void>(has_python_peers());
  if (options.run_id.empty()) options.run_id = random_run_id();
  return options;
}

}  // namespace

void check(const Options& options) {
  if (options.command.empty()) {
    throw ConfigError("[run] no program given: lockstep run --nproc-per-node 2 PROGRAM ARGS");
  }
  if (options.ranks < 1)
    throw ConfigError(fmt::format("[run] {} ranks: need 1 or more", options.ranks));
  if (options.max_restarts < 0) {
    throw ConfigError(fmt::format("[run] {} restarts: need 0 or more", options.max_restarts));
  }
  check_local_rank("--redirects", options.redirects.last_rank(), options);
  check_local_rank("--tee", options.tee.last_rank(), options);
  for (const int rank : options.shown_ranks) {
    check_local_rank("--local-ranks-filter", rank, options);
  }
}

Session::Session(const Options& given)
    : options(completed(given)),
      program(find_program(options.command.front())),
      rank_0_binds_port(binds_its_port(program, options.command)),
      mark(random_run_id()),
      orphan_reaper(mark),
      logs(options) {
  adopt_orphans();
  // The user could not guess the name.
  if (logs.is_on() && options.log_dir.empty()) {
    output.say(fmt::format("output of the ranks goes to {}", logs.folder()));
  }
  tell(fmt::format("job {}: {} rank{} of {} on this host{}", options.run_id, options.ranks,
                   options.ranks == 1 ? "" : "s", program,
                   logs.is_on() ? ", files in " + logs.folder() : ""));
}

void Session::tell(std::string_view text) {
  if (!options.verbose) return;
  const std::chrono::duration<double> since = std::chrono::steady_clock::now() - start_;
  output.say(fmt::format("{:.3f} s: {}", since.count(), text));
}

std::optional<int> Session::next_end() {
  while (const auto signal = signals.next()) {
    switch (*signal) {
      case SIGCHLD:
        break;
      case SIGUSR2:
      case SIGQUIT:
        output.say("no rank runs on this host at the moment");
        break;
      case SIGTSTP:
        raise(SIGSTOP);
        break;
      default:
        return signal;
    }
  }
  return std::nullopt;
}

bool Session::is_drained(std::chrono::milliseconds patience, std::optional<int>& signal) {
  using Clock = std::chrono::steady_clock;
  auto progress = Clock::now();
  size_t left = std::numeric_limits<size_t>::max();
  for (;;) {
    output.await_progress();
    output.pump();
    const size_t pending = output.pending();
    if (pending == 0) return true;
    if (pending < std::exchange(left, pending)) progress = Clock::now();
    const auto rest =
        std::chrono::ceil<std::chrono::milliseconds>(progress + patience - Clock::now()).count();
    if (rest <= 0) return false;
    std::vector<pollfd> events = {{signals.fd(), POLLIN, 0}};
    output.await_progress();
    output.await(events);
    poll(events.data(), events.size(), static_cast<int>(rest));
    do signal = next_end();
    while (signal == SIGUSR1);  // the job has ended already
    if (signal) return false;
  }
}

std::optional<int> Session::drain(std::optional<int> signal) {
  const auto patience = signal ? kFlushAfterSignal : flush_time();
  std::optional<int> late;
  const bool all = is_drained(patience, late);
  if (!all) {
    const std::string lost = output.drop_pending();
    if (!lost.empty()) {
      output.say(fmt::format("not written: {}{}", lost,
                             late ? ""
                                  : fmt::format("; nothing was taken for {:g} s{}",
                                                std::chrono::duration<double>(patience).count(),
                                                signal ? "" : " (LOCKSTEP_OUTPUT_TIMEOUT)")));
    }
  } else if (output.lost_bytes() > 0 && !output.is_abandoned()) {
    output.say(fmt::format("{} bytes of output could not be written to {}", output.lost_bytes(),
                           output.lost_where()));
  }
  std::optional<int> again;
  is_drained(kFlushAfterSignal, again);
  return late;
}

int Session::run(const std::function<int()>& job) {
  try {
    return job();
  } catch (...) {
    output.finish();
    drain();
    throw;
  }
}

std::optional<int> Session::pause(std::chrono::milliseconds time) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + time;
  for (;;) {
    output.pump();
    if (const auto signal = next_end()) return signal;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    if (left.count() <= 0) return std::nullopt;
    std::vector<pollfd> events = {{signals.fd(), POLLIN, 0}};
    output.await(events);
    poll(events.data(), events.size(), static_cast<int>(left.count()));
  }
}

}  // namespace lockstep::launch
