// Summaries over the ranks of a run, and the rank that differs most.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "lockstep/train/run_history.h"

namespace lockstep::train {

// Of the time of all ranks' steps.
struct Shares {
  double step = 0;                                                  // seconds, the mean
  double compute = 0, communication = 0, data = 0, checkpoint = 0;  // shares of it
};
Shares shares_of(const RunHistory& run);

// Whether some rank has reported how busy its GPU was.
bool knows_gpus(const RunHistory& run);

// By rank: seconds that it works in a step, the mean.
std::vector<double> work_of_ranks(const RunHistory& run);

// The index of the largest value; there is at least one.
size_t largest(const std::vector<double>& values);
// The median of all values but one; there are at least two.
double median_without(std::vector<double> values, size_t without);

// "rank 1", or "rank 1 (host-b)" in a run on several hosts.
std::string rank_of(const RunHistory& run, size_t rank);

}  // namespace lockstep::train
