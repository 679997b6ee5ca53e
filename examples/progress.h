// A line that says how far a training is; rank 0 prints it.
#pragma once

#include <lockstep/comm/world.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace example {

class Progress {
 public:
  Progress(const lockstep::World& world, int64_t steps)
      : main_(world.is_main()), updating_(is_updating(world)), steps_(steps) {}

  // True a few times a second, and at the end.
  bool due(int64_t step) {
    if (!main_) return false;
    const auto now = Clock::now();
    if (step < steps_ && now < next_) return false;
    next_ = now + std::chrono::milliseconds(updating_ ? 200 : 500);
    return true;
  }

  void print(int64_t step, double loss, double samples_per_s) const {
    std::printf("step %ld/%ld  loss %.4f  %.0f samples/s%s", step, steps_, loss, samples_per_s,
                updating_ && step < steps_ ? " \r" : "\n");
    std::fflush(stdout);
  }

 private:
  using Clock = std::chrono::steady_clock;

  // In a terminal "\r" lets the next line overwrite this one. The launcher passes it on, and makes
  // it a plain line in a file.
  static bool is_updating(const lockstep::World& world) {
    return isatty(STDOUT_FILENO) == 1 ||
           (world.size() > 1 && std::getenv("LOCKSTEP_CONTROL_FD") != nullptr);
  }

  bool main_;
  bool updating_;
  int64_t steps_;
  Clock::time_point next_ = Clock::now();
};

}  // namespace example
