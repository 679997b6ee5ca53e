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

// What continual_scores() makes of the matrix, once it is whole; what one domain alone does not
// have is not there.
std::map<std::string, double> figures_of(const RunResult& result);

// metrics.json
std::string metrics_json(const RunResult& result, const std::vector<StagePlan>& stages);

// The matrix as lines of text, and what is said at the end.
std::string matrix_text(const RunResult& result, const std::vector<StagePlan>& stages);
std::string summary_text(const RunResult& result);

}  // namespace lockstep::rl
