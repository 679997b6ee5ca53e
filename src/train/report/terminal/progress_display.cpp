#include "lockstep/train/progress_display.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iostream>

namespace lockstep::train {
namespace {

constexpr std::chrono::milliseconds kBetweenLines{200};
constexpr double kSmoothSeconds = 3;
constexpr const char* kErase = "\x1b[K";  // to the line's end

}  // namespace

ProgressDisplay::ProgressDisplay(std::ostream& out)
    : ProgressDisplay(
          out, &out == &std::cout ? TextStyle::of_file(STDOUT_FILENO) : TextStyle{.width = 0}) {
  follows_ = style_.rewrites;
}

ProgressDisplay::ProgressDisplay(std::ostream& out, const TextStyle& style)
    : out_(out), style_(style) {}

bool ProgressDisplay::is_due() const { return !style_.rewrites || Clock::now() >= next_; }

void ProgressDisplay::show(const StepReport& report, const RunExtent& extent) {
  const bool is_last = report.step == extent.steps;
  if (!is_last && !is_due()) {
    waiting_ = {report, extent};
    return;
  }
  write({report, extent}, is_last);
  if (is_last) finish();
}

// What is read many times a second must not tremble: the speed of the last few seconds.
void ProgressDisplay::smooth(Figures& figures) {
  double& speed = figures.report.samples_per_second;
  double& step = figures.extent.step_seconds;
  if (step <= 0) {
    for (const auto& rank : figures.report.ranks) step = std::max(step, rank.step_seconds);
  }
  const double passed = last_ ? figures.report.seconds - last_->report.seconds : 0;
  if (passed <= 0) return;
  // The first steps are slow, and must not be half of what is shown for long.
  const double window = std::min(kSmoothSeconds, figures.report.seconds / 2);
  const double kept = std::exp(-passed / window);
  speed += kept * (last_->report.samples_per_second - speed);
  step += kept * (last_->extent.step_seconds - step);
}

void ProgressDisplay::write(Figures figures, bool stays) {
  if (figures.report.ranks.size() <= 1 && !ranks_.empty()) figures.report.ranks = ranks_;
  if (follows_) style_.width = TextStyle::of_file(STDOUT_FILENO).width;
  if (style_.rewrites) smooth(figures);
  out_ << progress_line(figures.report, figures.extent, style_);
  // In one piece: what another stream brings between \r and \n would be written over the line.
  if (style_.rewrites) out_ << kErase << '\r';
  is_open_ = style_.rewrites && !stays;
  if (!is_open_) out_ << '\n';
  out_ << std::flush;
  next_ = Clock::now() + kBetweenLines;
  waiting_.reset();
  last_ = std::move(figures);
}

void ProgressDisplay::print(std::string_view line) {
  clear();
  out_ << line << "\n" << std::flush;
}

void ProgressDisplay::clear() {
  if (std::exchange(is_open_, false)) out_ << kErase << std::flush;
}

void ProgressDisplay::finish() {
  if (waiting_) write(*std::exchange(waiting_, std::nullopt), true);
  if (std::exchange(is_open_, false)) out_ << "\n" << std::flush;
  last_.reset();
}

}  // namespace lockstep::train
