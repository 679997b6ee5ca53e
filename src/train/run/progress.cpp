#include "lockstep/train/progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "train/report/text.h"
#include "train/run/busy_seconds.h"

namespace lockstep::train {

Progress::Progress(std::ostream& out, const ProgressOptions& options)
    : Progress(std::make_shared<ProgressDisplay>(out), options) {}

Progress::Progress(std::shared_ptr<ProgressDisplay> display, const ProgressOptions& options)
    : display_(std::move(display)), options_(options) {}

void Progress::begin_line(const RunState& state) {
  loss_ = 0;
  steps_ = samples_ = loss_samples_ = 0;
  since_ = busy_seconds(state);
}

void Progress::show(const RunState& state) {
  const auto steps = static_cast<double>(steps_);
  const double seconds = busy_seconds(state) - since_;
  const StepReport report{
      .step = state.step,
      .steps = steps_,
      .epoch = state.epoch,
      .seconds = busy_seconds(state),
      .mean_loss = loss_samples_ > 0 ? loss_ / static_cast<double>(loss_samples_) : state.loss,
      .learning_rate = state.learning_rate,
      .gradient_norm = state.gradient_norm,
      .samples_per_second = seconds > 0 ? static_cast<double>(samples_) / seconds : 0,
      .values = state.losses};
  const int64_t made = state.step - std::max<int64_t>(state.resumed_at, 0);
  display_->show(report,
                 {.steps = state.steps,
                  .epochs = state.epochs,
                  .stage = state.stage,
                  .step_seconds = seconds / steps,
                  .pause_seconds = made > 0 ? (state.evaluation_seconds + state.saving_seconds) /
                                                  static_cast<double>(made)
                                            : 0});
  begin_line(state);
}

void Progress::on_train_begin(const RunState& state) { begin_line(state); }

void Progress::on_step_end(const RunState& state, Requests&) {
  if (!state.is_main() || options_.every_steps == 0) return;
  // The last batch of an epoch may be a small one. What is not finite was skipped.
  if (state.step_samples > 0 && std::isfinite(state.loss)) {
    loss_ += state.loss * static_cast<double>(state.step_samples);
    loss_samples_ += state.step_samples;
  }
  ++steps_;
  samples_ += state.step_samples;
  const bool is_due =
      display_->rewrites() ? display_->is_due() : state.step % options_.every_steps == 0;
  if (is_due || state.step == state.steps) show(state);
}

void Progress::on_evaluate(const RunState& state, Requests&) {
  if (!state.is_main()) return;
  std::string text = fmt::format("evaluated after step {}:", state.step);
  for (const auto& [name, value] : state.metrics) {
    text += fmt::format("  {} {}", printable(name), metric_text(value));
  }
  display_->print(text);
}

void Progress::on_train_end(const RunState& state) {
  if (!state.is_main()) return;
  if (steps_ > 0) show(state);
  display_->finish();
}

void Progress::on_exception(const RunState& state, std::string_view) {
  if (state.is_main()) display_->finish();
}

}  // namespace lockstep::train
