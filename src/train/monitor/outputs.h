// Where rank 0 writes what is seen of a run.
#pragma once

#include <memory>
#include <vector>

#include "lockstep/train/monitor.h"
#include "lockstep/train/run_log.h"

namespace lockstep::train {

class MonitorOutputs {
 public:
  // Throws Error for files that cannot be written.
  MonitorOutputs(const MonitorOptions& options, RunStart start);

  void report(const StepReport& report, const std::vector<Event>& warnings);
  void evaluation(const EvaluationReport& evaluation);
  void event(const Event& event);
  void end(const RunEnd& end);

 private:
  std::unique_ptr<RunLog> file_;  // null without a directory
};

}  // namespace lockstep::train
