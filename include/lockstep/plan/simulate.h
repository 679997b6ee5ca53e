// Training steps played through, event by event, for 1 to 1,048,576 ranks: each rank computes unit
// after unit with a speed of its own, and each collective begins when its last rank arrives. Needs
// no torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/plan/strategy.h"

namespace lockstep::plan {

// What is played through.
struct SimulationOptions {
  int64_t steps = 3;
  // Each rank's computation is slower or faster in each step: a normal draw with this share as its
  // deviation.
  double jitter = 0.02;
  int64_t slow_ranks = 0;  // ranks that are slower all the time, by:
  double slow_factor = 1.5;
  bool prefetch = true;      // Fsdp gathers the next unit while one computes
  int64_t traced_ranks = 4;  // in the timeline: the first ones; and the slowest rank
  uint64_t seed = 1;
};

// What became of it, in seconds.
struct Simulation {
  std::vector<double> steps;  // until the last rank has updated
  double computation = 0;     // of the median rank, in a step
  double communication = 0;   // collectives were under way so long, in a step
  double waiting = 0;         // of the median rank for collectives, in a step
  int64_t slowest_rank = 0;
  std::string trace;  // Chrome's trace format, which ui.perfetto.dev shows; pid: rank
};

// Simulates steps; the same seed gives the same result. Throws ConfigError for what make_plan()
// refuses, a hybrid strategy on nodes that are not full, no step, jitter outside of 0 to 1, more
// slow ranks than there are and a factor of theirs below 1 or infinite, more than 100,000,000,000
// computations (a unit's forward or backward of a micro-batch on a rank), which would take longer
// than ten minutes, and a timeline with more than 1,000,000 spans of computation.
Simulation simulate(const ModelProfile& model, const Training& training, Strategy strategy,
                    const Machine& machine, int64_t ranks, const SimulationOptions& options = {});

}  // namespace lockstep::plan
