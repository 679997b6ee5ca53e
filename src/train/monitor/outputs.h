// The outputs of rank 0's monitoring: files, the terminal, the endpoint for Prometheus.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/train/monitor.h"
#include "lockstep/train/run_log.h"
#include "train/report/log/record_queue.h"

namespace lockstep::train {

// Files and the endpoint for Prometheus are written by a thread of its own. What is printed is
// printed at once.
class MonitorOutputs {
 public:
  // Throws Error for files that cannot be written.
  MonitorOutputs(const MonitorOptions& options, RunStart start);

  void report(const StepReport& report, const std::vector<Event>& warnings);
  void evaluation(const EvaluationReport& evaluation);
  void event(const Event& event);
  void end(const RunEnd& end);
  // Empty where nothing is served.
  const std::string& metrics_url() const { return url_; }

 private:
  struct Writers;
  void append(LogRecord record);

  std::string url_ = {};
  std::shared_ptr<ProgressDisplay> display_;  // null where nothing is printed
  Shown shown_;
  int64_t total_steps_ = 0;
  int64_t first_step_ = 0;              // made before
  std::unique_ptr<RecordQueue> queue_;  // null where nothing is written
};

}  // namespace lockstep::train
