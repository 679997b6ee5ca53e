#include "train/monitor/step_clock.h"

#include <algorithm>

#include "train/monitor/process_memory.h"

namespace lockstep::train {

RankFigures StepClock::figures(int64_t steps) {
  const auto now = Clock::now();
  const auto busy = flight::own_busy_ns();
  const auto count = static_cast<double>(std::max<int64_t>(steps, 1));
  const auto share = [&](flight::Activity activity) {
    const auto i = static_cast<size_t>(activity);
    return static_cast<double>(busy[i] - busy_[i]) * 1e-9 / count;
  };
  RankFigures figures{
      .step_seconds = std::chrono::duration<double>(now - since_).count() / count,
      .communication_seconds = share(flight::Activity::Communication),
      .data_seconds = share(flight::Activity::Data),
      .checkpoint_seconds = share(flight::Activity::Checkpoint),
      .memory_bytes = resident_bytes(),
  };
  since_ = now;
  busy_ = busy;
  return figures;
}

void StepClock::restart() {
  since_ = Clock::now();
  busy_ = flight::own_busy_ns();
}

double StepClock::since_start() const {
  return std::chrono::duration<double>(Clock::now() - begun_).count();
}

}  // namespace lockstep::train
