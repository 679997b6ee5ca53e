// Where the time of a run goes.
#pragma once

#include <chrono>
#include <utility>
#include <vector>

#include "rl/run/state.h"

namespace lockstep::rl {

// Adds what it lasts to the seconds of the run and of a stage.
class Clock {
 public:
  Clock(std::vector<Seconds*> seconds, const char* what)
      : seconds_(std::move(seconds)), what_(what) {}
  ~Clock() {
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin_;
    for (auto* seconds : seconds_) (*seconds)[what_] += taken.count();
  }
  Clock(const Clock&) = delete;
  Clock& operator=(const Clock&) = delete;

 private:
  std::vector<Seconds*> seconds_;
  const char* what_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace lockstep::rl
