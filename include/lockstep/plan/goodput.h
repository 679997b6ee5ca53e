// How much of a run's time is work, when ranks fail and the run resumes from checkpoints; and how
// often to save. After Young, "A first order approximation to the optimum checkpoint interval",
// CACM 1974, and Daly, "A higher order estimate of the optimum checkpoint interval for restart
// dumps", FGCS 2006. Needs no torch.
#pragma once

#include <cstdint>

#include "lockstep/core/compiler.h"

namespace lockstep::plan {

// Failures come at random, independent of each other and of time. All in seconds, above 0.
struct Reliability {
  int64_t ranks = 1;
  double rank_failure_interval = 0;  // mean time between two failures of one rank (MTBF)
  double save = 30;                  // for which training stands still at a checkpoint
  double restart = 120;              // from a failure until training continues

  // Mean time between two failures of the job.
  double failure_interval() const { return rank_failure_interval / static_cast<double>(ranks); }
};

// Share of time that is work which is never lost, when each `interval` seconds of work are followed
// by a checkpoint: Daly's exact expression. In [0, 1].
double goodput(const Reliability& reliability, double interval);

// Seconds of work between checkpoints: the first-order and the higher-order estimate, and the one
// with the most goodput(), found by search.
double young_interval(const Reliability& reliability);
double daly_interval(const Reliability& reliability);
double best_interval(const Reliability& reliability);

// A run of `work` seconds of computation, failure by failure.
struct SimulatedRun {
  double seconds = 0;  // until all work is done and saved
  double saving = 0, restarting = 0, lost = 0;
  int64_t failures = 0;
  double done = 0;  // seconds of work that are saved: all, unless the simulation was cut short
  double goodput = 0;
};

// Simulates a run; the same seed gives the same numbers. Gives up, with goodput 0 and `done` below
// `work`, at the 100,000th failure. Throws ConfigError for more than 100,000,000 checkpoints.
SimulatedRun simulate_run(const Reliability& reliability, double interval, double work,
                          uint64_t seed);

}  // namespace lockstep::plan
