#include <cmath>
#include <ostream>
#include <string>
#include <utility>

#include "core/files/lasting_path.h"
#include "lockstep/train/progress.h"

namespace lockstep::train {

Monitoring::Monitoring(const comm::World& world, MonitorOptions options)
    : world_(world), options_(std::move(options)) {
  for (auto* path : {&options_.directory, &options_.open_metrics_file}) *path = lasting_path(*path);
}
Monitoring::~Monitoring() = default;

void Monitoring::on_train_begin(const RunState& state) {
  MonitorOptions options = options_;
  options.total_steps = state.steps;
  options.resumed_at = state.resumed_at;
  monitor_ = std::make_unique<RunMonitor>(world_, std::move(options));
  if (const std::string url = monitor_->metrics_url(); !url.empty()) {
    world_.main_out() << "metrics for Prometheus: " << url << std::endl;
  }
}

void Monitoring::on_epoch_begin(const RunState& state) {
  if (state.stage == stage_) return;
  stage_ = state.stage;
  monitor_->event("stage", stage_);
}

void Monitoring::on_step_end(const RunState& state, Requests&) {
  StepFigures figures{.loss = state.loss,
                      .samples = state.step_samples,
                      .learning_rate = state.learning_rate,
                      .gradient_norm = state.gradient_norm,
                      .epoch = state.epoch,
                      .is_of_all_ranks = true,
                      // With NonFinite::Error the run would have ended.
                      .is_skipped = !std::isfinite(state.loss)};
  // Each step may turn out to be the last one.
  if (state.is_main()) {
    figures.values = state.losses;
    if (state.loss_scale != 1) figures.values["loss_scale"] = state.loss_scale;
    if (state.skipped > 0) figures.values["skipped"] = static_cast<double>(state.skipped);
  }
  monitor_->step(figures);
}

void Monitoring::on_evaluate(const RunState& state, Requests&) {
  monitor_->evaluation(state.metrics);
}
// A run that resumes here makes the steps after it, so that those before have to be in a report.
void Monitoring::on_save(const RunState&, Requests&) {
  monitor_->report_rest();
  monitor_->event("save");
}
void Monitoring::on_train_end(const RunState& state) {
  monitor_->report_rest();
  monitor_->finish(state.ended.empty() ? "finished" : state.ended);
}
void Monitoring::event(std::string_view kind, std::string_view text) {
  if (monitor_) monitor_->event(kind, text);
}
void Monitoring::on_exception(const RunState&, std::string_view what) {
  if (monitor_) monitor_->fail(what);
}

}  // namespace lockstep::train
