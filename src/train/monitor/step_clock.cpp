#include "train/monitor/step_clock.h"

#include <algorithm>

#include "train/monitor/process_memory.h"

namespace lockstep::train {

void StepClock::mark() {
  marked_ = Clock::now();
  marked_busy_ = flight::own_busy_ns();
}

RankFigures StepClock::figures(int64_t steps) {
  const auto count = static_cast<double>(std::max<int64_t>(steps, 1));
  const auto share = [&](flight::Activity activity) {
    const auto i = static_cast<size_t>(activity);
    return static_cast<double>(marked_busy_[i] - busy_[i]) * 1e-9 / count;
  };
  RankFigures figures{
      .step_seconds = std::chrono::duration<double>(marked_ - since_).count() / count,
      .communication_seconds = share(flight::Activity::Communication),
      .data_seconds = share(flight::Activity::Data),
      .checkpoint_seconds = share(flight::Activity::Checkpoint),
      .memory_bytes = resident_bytes(),
  };
  since_ = marked_;
  busy_ = marked_busy_;
  return figures;
}

void StepClock::restart() {
  mark();
  since_ = marked_;
  busy_ = marked_busy_;
}

double StepClock::since_start() const {
  return std::chrono::duration<double>(Clock::now() - begun_).count();
}

double StepClock::at_mark() const {
  return std::chrono::duration<double>(marked_ - begun_).count();
}

}  // namespace lockstep::train
