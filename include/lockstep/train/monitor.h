// Monitoring of a run, for a training loop of any kind: the log, warnings, the progress line,
// TensorBoard, Prometheus, a trace.
//
//   RunMonitor monitor(world, {.directory = "runs/a", .every_steps = 20, .module = *net});
//   for (auto [x, y] : loader.epoch(epoch)) {
//     ...
//     monitor.step({.loss = loss.item<double>(), .samples = x.size(0)});
//   }
//   monitor.finish();
//
// `lockstep report runs/a` makes a page of it, `lockstep top runs/a` shows it while it runs.
// docs/metrics.md and docs/report.md.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/checkpoint/module_ref.h"
#include "lockstep/comm/world.h"
#include "lockstep/train/progress_display.h"
#include "lockstep/train/run_log.h"
#include "lockstep/train/run_warnings.h"

namespace lockstep::train {

// What rank 0 prints of a run.
enum class Shown {
  Nothing,   // but warnings
  Progress,  // a line on a terminal that is written over, otherwise a line for each report
};

// Steps, counted from 1; the first and the last belong to it.
struct StepRange {
  int64_t first = 0;
  int64_t last = 0;  // 0: none
};

// What is reported, where to, and how often. The same on all ranks.
struct MonitorOptions {
  // Gets metrics.jsonl, and what else is asked for. Empty: no files. A relative one, as that of
  // open_metrics_file, is of the working directory in which the RunMonitor was made.
  std::string directory = {};
  int64_t every_steps = 50;  // between two reports
  std::string name = {};     // of the program or model
  int64_t total_steps = 0;   // that the run will have; 0: not known
  int64_t resumed_at = -1;   // the step that was restored; -1: none. Steps are counted from it
  std::map<std::string, std::string> config = {};  // as the report shows it
  Shown shown = Shown::Nothing;
  // Through which rank 0 prints, with others that print through it, such as a Progress callback,
  // which then names the slowest rank, too. Null: standard output.
  std::shared_ptr<ProgressDisplay> display = nullptr;
  // Event files for TensorBoard, in the folder `tensorboard` of `directory`.
  bool tensorboard = false;
  // A file with the last report for the textfile collector of Prometheus's node_exporter, as
  // /var/lib/prometheus/node-exporter/lockstep.prom. Empty: none.
  std::string open_metrics_file = {};
  // Where rank 0 serves the last report over HTTP for Prometheus, as HOST:PORT; "127.0.0.1:0" takes
  // a free port. Anyone who can connect can read it. Empty: nowhere.
  std::string prometheus_address = {};
  // What all ranks do in these steps, at most 1,000, is written to trace.json in `directory`, for
  // Perfetto: libtorch's operators, collectives, waits, data, checkpoints. Later steps are as fast
  // as without.
  StepRange trace_steps = {};
  WarningLimits warnings = {};
  // Whose parameters are looked at when a loss or a gradient is not finite.
  std::optional<ModuleRef> module = std::nullopt;
};

// A step, as this rank has made it.
struct StepFigures {
  // The loss of this rank's batch. Reports have the mean over the ranks, by their samples.
  std::optional<double> loss = std::nullopt;
  int64_t samples = 0;  // of this rank's batch
  std::optional<double> learning_rate = std::nullopt;
  std::optional<double> gradient_norm = std::nullopt;
  int64_t epoch = 0;
  std::map<std::string, double> values = {};  // rank 0's are reported
  std::string keys = {};                      // StepReport::keys; rank 0's are reported
  // Whether rank 0's loss and samples are those of all ranks already. Then those of the others are
  // not looked at.
  bool is_of_all_ranks = false;
  // Whether it made no update, as where a loss that is not finite is skipped. That loss is then in
  // no mean.
  bool is_skipped = false;
};

// Every rank constructs it and calls step() equally often. Functions that all ranks have to call
// say so. It measures by itself how long a step takes and how much of that the rank waits for
// others, for data (data::Loader, or flight::Span(flight::Activity::Data) of the program's own) and
// for checkpoints (Checkpointer). A report costs one all_gather of a few numbers; what is written
// is written by another thread of rank 0.
//
// Between two reports the loss is looked at, not communicated: one that is not finite is reported
// in the next report, with its step and rank.
class RunMonitor {
 public:
  // Gathers the hosts' names. Throws on all ranks ConfigError for options that contradict each
  // other on any of them, and for steps to report or trace that differ between ranks; Error when
  // rank 0 cannot write its files.
  RunMonitor(const comm::World& world, MonitorOptions options);
  ~RunMonitor();
  RunMonitor(const RunMonitor&) = delete;
  RunMonitor& operator=(const RunMonitor&) = delete;

  // After each step, on every rank. Reports when it is time to, and after step `total_steps`.
  void step(const StepFigures& figures);
  // Reports the steps since the last report, where there are any: before finish(), when a run ends
  // between two reports. On every rank, outside of an exception.
  void report_rest();
  // Whether the next step() reports: what is costly to find out need not be known otherwise.
  bool is_next_reported() const;
  // Steps made so far, those before `resumed_at` too.
  int64_t steps() const;

  // The rest is for rank 0 to call; on other ranks it does nothing.

  // Metrics of an evaluation.
  void evaluation(const std::map<std::string, double>& metrics);
  // Something happened: "save", "preemption", or a kind of the program's own.
  void event(std::string_view kind, std::string_view text = {});
  // The run has ended; nothing is reported afterwards. Of steps that report_rest() has not reported
  // it writes what rank 0 knows by itself, without figures of other ranks, where the last step's
  // figures are of all ranks (StepFigures::is_of_all_ranks, or one rank); else nothing, since the
  // samples and the loss of the others are not known. The destructor calls it, too, with "left by
  // an exception" during one and "finished" otherwise.
  void finish(std::string_view outcome = "finished");
  // It ends with an error.
  void fail(std::string_view what);

  // Where the last report is served, "http://127.0.0.1:9464/metrics"; empty on other ranks than 0,
  // and without a prometheus_address.
  std::string metrics_url() const;

  // The last report, on every rank; of step 0 before the first.
  const StepReport& last() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep::train

namespace lockstep {
using train::RunMonitor;
}  // namespace lockstep
