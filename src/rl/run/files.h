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

// One line of trajectories.jsonl, without a line feed.
struct TrajectoryPlace {
  Unit unit;
  int64_t number = 0;  // of the episode
  int64_t group_size = 1;
  int64_t lanes = 1;
};
std::string trajectory_line(const Played& played, const TrajectoryPlace& place);

// The file then has the first `lines` lines; fewer are an error. Throws Error.
void cut_lines(const std::string& path, int64_t lines);
void append(const std::string& path, const std::string& text);

// results.json
std::string results_json(const RunResult& result, const std::vector<StagePlan>& stages,
                         const RunOptions& options, const RunState& state, const Seconds& seconds,
                         const std::map<std::string, std::string>& environment);

// The matrix as lines of text.
std::string matrix_text(const RunResult& result, const std::vector<StagePlan>& stages);
// What is said at the end, of the text of metrics.json: our figures, and the guides' beside them.
std::string summary_text(const std::string& metrics);

}  // namespace lockstep::rl
