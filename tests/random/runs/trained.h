// What one rank does in one start of a run, and what it leaves in the run's folder.
#pragma once

#include <string>

#include "random/runs/plan.h"

namespace lockstep::test::runs {

// Files of a run's folder, beside "checkpoints" and "log".
constexpr const char* kSeries = "series";    // rank 0's: where it came to, a line each
constexpr const char* kReached = "reached";  // is there once the start's interruption has happened
// Of each rank, what is left at the end: "end.0".
constexpr const char* kEnd = "end.";

// Trains until the end or the interruption of `start`; returns the process's exit status.
int train(const Settings& run, const Settings& start, const std::string& folder);

// Counts calls of the file system in this process from now on, and calls `reach` at each; null: no
// more. Returns how many there were.
int64_t watch_files(void (*reach)(int64_t call));

}  // namespace lockstep::test::runs
