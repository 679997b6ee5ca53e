#include "train/monitor/outputs.h"

#include "lockstep/core/log.h"

namespace lockstep::train {

MonitorOutputs::MonitorOutputs(const MonitorOptions& options, RunStart start) {
  if (!options.directory.empty()) {
    file_ = std::make_unique<RunLog>(options.directory + "/metrics.jsonl");
    file_->append(std::move(start));
  }
}

void MonitorOutputs::report(const StepReport& report, const std::vector<Event>& warnings) {
  if (file_) file_->append(report);
  for (const Event& warning : warnings) event(warning);
}

void MonitorOutputs::evaluation(const EvaluationReport& evaluation) {
  if (file_) file_->append(evaluation);
}

void MonitorOutputs::event(const Event& event) {
  if (event.kind == "warning") log::warn(event.text + ". " + event.advice);
  if (file_) file_->append(event);
}

void MonitorOutputs::end(const RunEnd& end) {
  if (!file_) return;
  file_->append(end);
  file_->flush();
}

}  // namespace lockstep::train
