// Where rank 0 writes what is seen of a run.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/train/monitor.h"
#include "lockstep/train/run_log.h"
#include "lockstep/train/tensorboard.h"
#include "train/report/metrics_server.h"

namespace lockstep::train {

class MonitorOutputs {
 public:
  // Throws Error for files that cannot be written.
  MonitorOutputs(const MonitorOptions& options, RunStart start);

  void report(const StepReport& report, const std::vector<Event>& warnings);
  void evaluation(const EvaluationReport& evaluation);
  void event(const Event& event);
  void end(const RunEnd& end);
  // Empty where nothing is served.
  std::string metrics_url() const { return server_ ? server_->url() : ""; }

 private:
  void show(const StepReport& report);

  std::unique_ptr<RunLog> file_;  // null without a directory
  std::unique_ptr<TensorBoardWriter> tensorboard_;
  std::unique_ptr<MetricsServer> server_;
  std::string open_metrics_, name_;
  bool open_metrics_warned_ = false;
  Shown shown_;
  int64_t total_steps_ = 0;
  bool is_line_open_ = false;  // the terminal's cursor stands behind a progress line
};

}  // namespace lockstep::train
