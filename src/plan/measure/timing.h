// How long calls take on all ranks.
#pragma once

#include <functional>

#include "lockstep/comm/group.h"

namespace lockstep::plan {

inline const comm::CallOptions kBenchLabel = {.label = "bench"};

// Every rank calls it.
double largest_of_ranks(const comm::Group& group, double value);

// Seconds of a call, the median, of the slowest rank, measured for about `budget` seconds. All
// ranks make the same number of calls, and each when all are there, so that no rank computes while
// another one waits. Every rank calls it.
double seconds_of(const comm::Group& group, double budget, const std::function<void()>& call);

}  // namespace lockstep::plan
