#include "train/monitor/outputs.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/train/open_metrics.h"
#include "lockstep/train/progress_line.h"

namespace lockstep::train {

MonitorOutputs::MonitorOutputs(const MonitorOptions& options, RunStart start)
    : open_metrics_(options.open_metrics_file),
      name_(options.name),
      shown_(options.shown),
      total_steps_(options.total_steps) {
  if (options.tensorboard && options.directory.empty()) {
    throw ConfigError("[monitor] tensorboard needs a directory for its files");
  }
  if (!options.prometheus_address.empty()) {
    server_ = std::make_unique<MetricsServer>(options.prometheus_address);
    server_->publish(open_metrics({.step = std::max<int64_t>(options.resumed_at, 0)}, name_));
  }
  if (!options.directory.empty()) {
    file_ = std::make_unique<RunLog>(options.directory + "/metrics.jsonl");
    file_->append(std::move(start));
  }
  if (options.tensorboard) {
    tensorboard_ = std::make_unique<TensorBoardWriter>(options.directory + "/tensorboard");
  }
}

void MonitorOutputs::show(const StepReport& report) {
  if (shown_ == Shown::Nothing) return;
  const std::string line = progress_line(report, total_steps_, TextStyle::of_file(STDOUT_FILENO));
  is_line_open_ = is_terminal(STDOUT_FILENO);
  std::fputs((is_line_open_ ? "\r" + line + "\x1b[K" : line + "\n").c_str(), stdout);
  std::fflush(stdout);
}

void MonitorOutputs::report(const StepReport& report, const std::vector<Event>& warnings) {
  if (file_) file_->append(report);
  if (tensorboard_) tensorboard_->report(report);
  if (server_) server_->publish(open_metrics(report, name_));
  if (!open_metrics_.empty() && !write_open_metrics(open_metrics_, report, name_) &&
      !std::exchange(open_metrics_warned_, true)) {
    log::warn("[monitor] " + open_metrics_ + " cannot be written; training goes on without");
  }
  for (const Event& warning : warnings) event(warning);
  show(report);
}

void MonitorOutputs::evaluation(const EvaluationReport& evaluation) {
  if (file_) file_->append(evaluation);
  if (tensorboard_) tensorboard_->evaluation(evaluation);
}

void MonitorOutputs::event(const Event& event) {
  if (event.kind == "warning") {
    if (std::exchange(is_line_open_, false)) std::fputs("\r\x1b[K", stdout);
    std::fflush(stdout);
    log::warn(event.text + ". " + event.advice);
  }
  if (file_) file_->append(event);
}

void MonitorOutputs::end(const RunEnd& end) {
  if (std::exchange(is_line_open_, false)) {
    std::fputs("\n", stdout);
    std::fflush(stdout);
  }
  if (!file_) return;
  file_->append(end);
  file_->flush();
}

}  // namespace lockstep::train
