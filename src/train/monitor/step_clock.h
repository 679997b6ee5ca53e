// Where the time of this rank's steps goes.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>

#include "lockstep/core/flight.h"
#include "lockstep/train/run_log.h"

namespace lockstep::train {

// Counts from one report to the next.
class StepClock {
 public:
  // A step has ended: the next figures() are up to here.
  void mark();
  // The means of `steps` steps that were made since the last call, or the construction, up to the
  // last mark(). What comes after it is part of the next figures.
  RankFigures figures(int64_t steps);
  // From now on, without what was before.
  void restart();

  double since_start() const;
  // The same at the last mark().
  double at_mark() const;

 private:
  using Clock = std::chrono::steady_clock;

  Clock::time_point begun_ = Clock::now();
  Clock::time_point since_ = begun_;
  Clock::time_point marked_ = begun_;
  std::array<uint64_t, flight::kActivities> busy_ = flight::own_busy_ns();
  std::array<uint64_t, flight::kActivities> marked_busy_ = busy_;
};

}  // namespace lockstep::train
