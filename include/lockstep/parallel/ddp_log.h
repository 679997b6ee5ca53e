// Where the time of distributed training goes, pass by pass.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/core/compiler.h"

namespace lockstep::parallel {

// One bucket in one pass, on this rank's steady clock.
struct BucketTimes {
  std::chrono::steady_clock::time_point
      started;  // all its gradients were ready, and all buckets before it had started
  std::chrono::steady_clock::time_point over;  // this rank saw its average
  int64_t bytes = 0;
};

// One backward() that averaged gradients.
struct PassTimes {
  // The end of the pass before, or zero_grad() if that came later.
  std::chrono::steady_clock::time_point since;
  // The first gradient arrived, which is where this rank notices a backward().
  std::chrono::steady_clock::time_point first_gradient;
  // Nothing was left to compute; what follows is waiting for communication.
  std::chrono::steady_clock::time_point last_gradient;
  std::chrono::steady_clock::time_point over;
  std::vector<BucketTimes> buckets;

  // In microseconds.
  using Duration = std::chrono::duration<double, std::micro>;
  // Data, forward, and backward up to the first parameter's gradient.
  Duration forward() const { return first_gradient - since; }
  Duration backward() const { return last_gradient - first_gradient; }
  // The time during which at least one bucket was being reduced.
  Duration communication() const;
  // The part of communication() that ran beside backward().
  Duration overlap() const;
  // What communication added to the step.
  Duration exposed() const { return over - last_gradient; }
};

// The last kPasses passes of a Ddp on this rank, and what does not change.
struct DdpLog {
  static constexpr size_t kPasses = 256;

  std::string backend;
  int rank = 0;
  int world_size = 1;
  std::string hook;  // "all_reduce" without one
  int64_t parameters = 0;
  int64_t parameter_bytes = 0;
  std::vector<int64_t> bucket_bytes;  // as they are now
  bool rebuilt = false;
  std::vector<std::string> order;   // parameters as their gradients arrived in the last pass
  std::vector<std::string> unused;  // not reached by this rank in the last pass
  int64_t pass_count = 0;           // since construction
  std::vector<PassTimes> passes;    // oldest first

  // A few lines: the constants, and means over `passes`.
  std::string summary() const;
  // The passes as Chrome's Trace Event Format (JSON), to be opened by about:tracing or Perfetto:
  // this rank is the process, compute and each bucket are its threads. Files of several ranks may
  // be joined: times are of the host's monotonic clock.
  std::string chrome_trace() const;
};

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::DdpLog;
using parallel::PassTimes;
}  // namespace lockstep
