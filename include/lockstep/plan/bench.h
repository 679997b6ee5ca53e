// What a machine can do, measured: arithmetic, memory, collectives.
#pragma once

#include <cstdint>

#include "lockstep/comm/world.h"
#include "lockstep/plan/machine.h"

namespace lockstep::plan {

// How long to measure.
struct BenchOptions {
  double seconds_each = 0.2;         // for each of the measurements
  int64_t largest_bytes = 32 << 20;  // of a collective, 1024 at least
};

// Every rank calls it: all compute at once, as in training, and the slowest counts. Ranks on CPUs
// of one node; the result is the same on all. Throws ConfigError for options out of range, for
// GPUs, of which known_devices() has a table, and for ranks on several nodes.
Machine measure_machine(const comm::World& world, const BenchOptions& options = {});

}  // namespace lockstep::plan
