// Times the passes of a Reducer.
#pragma once

#include <deque>

#include "lockstep/parallel/ddp_log.h"

namespace lockstep::parallel {

class PassClock {
 public:
  using Clock = std::chrono::steady_clock;

  void idle() { since_ = Clock::now(); }
  void begin(size_t buckets);
  void started(size_t bucket, int64_t bytes) {
    current_.buckets[bucket] = {Clock::now(), {}, bytes};
  }
  void over(size_t bucket) {
    if (bucket < current_.buckets.size()) current_.buckets[bucket].over = Clock::now();
  }
  void last_gradient() { current_.last_gradient = Clock::now(); }
  void end();

  int64_t count() const { return count_; }
  void write(DdpLog& log) const;

 private:
  Clock::time_point since_ = Clock::now();
  PassTimes current_;
  std::deque<PassTimes> passes_;
  int64_t count_ = 0;
};

}  // namespace lockstep::parallel
