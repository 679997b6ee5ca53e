// Figures of evaluated tasks.
#pragma once

#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "lockstep/rl/scores.h"

namespace lockstep::rl {

using Tasks = std::span<const EvaluatedTask>;

// 0 of none.
double mean(const std::vector<double>& values);

// The mean over a task's trials.
double reward_of(const EvaluatedTask& task);
// Over all trials of the tasks that `chosen` accepts; nothing when it accepts none.
std::optional<double> mean_reward(Tasks tasks,
                                  const std::function<bool(const EvaluatedTask&)>& chosen);
double mean_reward(Tasks tasks);

// Trials that earned a whole reward.
Trials trials_of(const EvaluatedTask& task);

// Whether the task's solution calls it.
bool uses(const EvaluatedTask& task, const std::string& tool);
std::set<std::string> tools_of(const EvaluatedTask& task);
std::set<std::string> tools_of(Tasks tasks);

// F1 of the called names against the solution's, as multisets; mean over trials.
double tool_selection(Tasks tasks);
// Calls that were read and returned no error, of all. Nothing without a call.
std::optional<double> tool_invocation(Tasks tasks);
// Trials whose customer was told what he had to be told, of those in which there was something.
std::optional<double> tool_output_usage(Tasks tasks);

// bootstrap() of several columns with this many tasks: each is drawn from its own.
Interval bootstrap_columns(
    std::span<const int64_t> tasks, uint64_t seed,
    const std::function<double(const std::vector<std::vector<int64_t>>& drawn)>& statistic);

// stage_scores() of a run whose cells fit.
StageScores scores_of_stage(const RunRecord& run, size_t stage);

}  // namespace lockstep::rl
