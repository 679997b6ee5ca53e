// What a launcher keeps over all attempts of its job.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include "launch/job/run.h"
#include "launch/output/log_multiplexer.h"
#include "launch/output/logs.h"
#include "launch/process/orphan_reaper.h"
#include "launch/process/signals.h"

namespace lockstep::launch {

// Throws ConfigError for options with which no job can be started.
void check(const Options& options);

struct Session {
  // Looks the program up, chooses a run id when there is none, and takes over the process's
  // signals, streams and orphans. Throws StartError, ConfigError.
  explicit Session(const Options& given);

  // Waits until all output is written to its readers and the log files. Stops after
  // LOCKSTEP_OUTPUT_TIMEOUT seconds (60) without progress, or one second after the `signal` that
  // has ended the job; then reports how much was not written. Returns the signal that came
  // meanwhile.
  std::optional<int> drain(std::optional<int> signal = std::nullopt);
  // Runs the job. When that throws, as where a restart cannot start its ranks, what the ranks have
  // printed before is written all the same.
  int run(const std::function<int()>& job);
  // Waits for so long, or until a signal comes that ends the job: returns that. SIGUSR1 is one, a
  // scheduler's notice of preemption: there is no rank to forward it to.
  std::optional<int> pause(std::chrono::milliseconds time);
  // With --verbose: a line with the seconds since the start.
  void tell(std::string_view text);
  // While no rank runs here: the next signal that has come and ends the job. Others are answered.
  std::optional<int> next_end();

  Options options;
  std::string program;  // the file that the command's first word names
  // As binds_its_port() says. Asked once: later the file's disk might keep the launcher waiting.
  const bool rank_0_binds_port;
  Signals signals;
  const std::string mark;      // of this job's processes, in their environment
  OrphanReaper orphan_reaper;  // before there are threads: it continues with a copy of this process
  LogMultiplexer output;
  Logs logs;
  bool has_said_no_files = false;  // of a restart

 private:
  // Whether all is written; a signal ends the wait.
  bool is_drained(std::chrono::milliseconds patience, std::optional<int>& signal);

  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace lockstep::launch
