#include "lockstep/train/progress.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <cmath>
#include <ostream>

#include "train/run/text.h"

namespace lockstep::train {

void Pace::add(const RunState& state) {
  loss_ += state.loss;
  ++steps_;
  samples_ += state.step_samples;
}

void Pace::reset(const RunState& state) {
  loss_ = 0;
  steps_ = samples_ = 0;
  since_ = busy_seconds(state);
}

double Pace::samples_per_s(const RunState& state) const {
  const double seconds = busy_seconds(state) - since_;
  return seconds > 0 ? static_cast<double>(samples_) / seconds : 0;
}

Progress::Progress(std::ostream& out, const ProgressOptions& options)
    : out_(out), options_(options) {}

std::string Progress::line(const RunState& state, const Pace& pace) {
  std::string text;
  if (!state.stage.empty()) text += fmt::format("stage {}  ", state.stage);
  text += fmt::format("epoch {}", state.epoch + 1);
  if (state.epochs > 0) text += fmt::format("/{}", state.epochs);
  text += fmt::format("  step {}", state.step);
  if (state.steps > 0) {
    text += fmt::format("/{}  {:.0f} %", state.steps,
                        100.0 * static_cast<double>(state.step) / static_cast<double>(state.steps));
  }
  text += fmt::format("  loss {:.4f}", pace.loss());
  for (const auto& [name, loss] : state.losses) text += fmt::format("  {} {:.4f}", name, loss);
  text += fmt::format("  lr {:.3g}", state.learning_rate);
  if (state.gradient_norm) text += fmt::format("  grad norm {:.3g}", *state.gradient_norm);
  const double rate = pace.samples_per_s(state);
  text += fmt::format("  {} samples/s", with_commas(std::llround(rate)));
  if (state.steps > 0 && rate > 0 && state.step_samples > 0) {
    const double left = static_cast<double>(state.steps - state.step) *
                        static_cast<double>(state.step_samples) / rate;
    text += fmt::format("  {} left", long_time(left));
  }
  return text;
}

void Progress::print(const RunState& state) {
  out_ << line(state, pace_) << (options_.updating && state.step < state.steps ? " \r" : "\n")
       << std::flush;
  printed_at_ = state.step;
}

void Progress::on_train_begin(const RunState& state) { pace_.reset(state); }

void Progress::on_step_end(const RunState& state, Requests&) {
  if (!state.is_main()) return;
  pace_.add(state);
  if (options_.updating) {
    const auto now = std::chrono::steady_clock::now();
    if (now < next_ && state.step < state.steps) return;
    next_ = now + std::chrono::milliseconds(200);
    return print(state);
  }
  if (options_.every_steps == 0 || state.step % options_.every_steps != 0) return;
  print(state);
  pace_.reset(state);
}

void Progress::on_evaluate(const RunState& state, Requests&) {
  if (!state.is_main()) return;
  std::string text = fmt::format("evaluated after step {}:", state.step);
  for (const auto& [name, value] : state.metrics) text += fmt::format("  {} {:.4f}", name, value);
  out_ << text << (options_.updating ? "          \n" : "\n") << std::flush;
}

void Progress::on_train_end(const RunState& state) {
  if (state.is_main() && options_.every_steps > 0 && state.step > printed_at_ &&
      pace_.loss() != 0) {
    print(state);
  }
}

}  // namespace lockstep::train
