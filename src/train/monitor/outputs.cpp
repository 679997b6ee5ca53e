#include "train/monitor/outputs.h"

#include <algorithm>
#include <iostream>
#include <optional>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/train/open_metrics.h"
#include "lockstep/train/tensorboard.h"
#include "train/report/exporters/metrics_server.h"
#include "train/report/log/file.h"

namespace lockstep::train {

// The queue's thread writes through them.
struct MonitorOutputs::Writers {
  std::string name = {};
  std::optional<LogFile> log = {};
  std::optional<TensorBoardWriter> tensorboard = {};
  std::optional<MetricsServer> server = {};
  std::string open_metrics_file = {};
  bool open_metrics_warned = false;

  void take(const LogRecord& record, double unix_seconds, uint64_t missing) {
    if (log) log->take(record, unix_seconds, missing);
    if (const auto* const report = std::get_if<StepReport>(&record)) {
      if (tensorboard) tensorboard->report(*report);
      if (server) server->publish(open_metrics(*report, name));
      if (!open_metrics_file.empty()) write_last(*report);
    } else if (const auto* const evaluation = std::get_if<EvaluationReport>(&record)) {
      if (tensorboard) tensorboard->evaluation(*evaluation);
    }
  }

  void write_last(const StepReport& report) {
    if (write_open_metrics(open_metrics_file, report, name)) return;
    if (std::exchange(open_metrics_warned, true)) return;
    log::warn("[monitor] " + open_metrics_file + " cannot be written; training continues without");
  }
};

MonitorOutputs::MonitorOutputs(const MonitorOptions& options, RunStart start)
    : display_(options.display),
      shown_(options.shown),
      total_steps_(options.total_steps),
      first_step_(std::max<int64_t>(options.resumed_at, 0)) {
  if (shown_ == Shown::Progress && !display_) {
    display_ = std::make_shared<ProgressDisplay>(std::cout);
  }
  const auto writers = std::make_shared<Writers>();
  writers->name = options.name;
  writers->open_metrics_file = options.open_metrics_file;
  if (!options.prometheus_address.empty()) {
    writers->server.emplace(options.prometheus_address);
    writers->server->publish(
        open_metrics({.step = std::max<int64_t>(options.resumed_at, 0)}, options.name));
    url_ = writers->server->url();
  }
  if (!options.directory.empty()) writers->log.emplace(options.directory + "/metrics.jsonl");
  if (options.tensorboard) {
    writers->tensorboard.emplace(options.directory + "/tensorboard", options.resumed_at);
  }
  if (!writers->log && !writers->server && options.open_metrics_file.empty()) return;
  queue_ = std::make_unique<RecordQueue>(
      [writers](const LogRecord& record, double unix_seconds, uint64_t missing) {
        writers->take(record, unix_seconds, missing);
      });
  queue_->append(std::move(start));
}

void MonitorOutputs::append(LogRecord record) {
  if (queue_) queue_->append(std::move(record));
}

void MonitorOutputs::report(const StepReport& report, const std::vector<Event>& warnings) {
  append(report);
  for (const Event& warning : warnings) event(warning);
  if (!display_) return;
  display_->note_ranks(report.ranks);
  if (shown_ != Shown::Progress) return;
  // What is left has evaluations and checkpoints in it, too.
  const auto made = static_cast<double>(report.step - first_step_);
  display_->show(report, {.steps = total_steps_, .step_seconds = report.seconds / made});
}

void MonitorOutputs::evaluation(const EvaluationReport& evaluation) { append(evaluation); }

void MonitorOutputs::event(const Event& event) {
  if (event.kind == "warning") {
    if (display_) display_->clear();
    log::warn(event.text + ". " + event.advice);
  }
  append(event);
}

void MonitorOutputs::end(const RunEnd& end) {
  if (display_ && shown_ == Shown::Progress) display_->finish();
  if (!queue_) return;
  queue_->append(end);
  queue_->flush();
}

}  // namespace lockstep::train
