// What a run writes beside its checkpoints, on rank 0.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/rl/run.h"
#include "rl/run/plan.h"
#include "rl/run/state.h"

namespace lockstep::rl {

// Seconds of this process, by what they were spent on. Not part of what a run repeats.
using Seconds = std::map<std::string, double>;

// results.json
std::string results_json(const RunResult& result, const std::vector<StagePlan>& stages,
                         const RunOptions& options, const RunState& state, const Seconds& seconds,
                         const std::map<std::string, std::string>& environment);

// The matrix as lines of text.
std::string matrix_text(const RunResult& result, const std::vector<StagePlan>& stages);
// What is said at the end, of the text of metrics.json: our figures, and the guides' beside them.
std::string summary_text(const std::string& metrics);

}  // namespace lockstep::rl
