// What the evaluation after a stage says of it.
#include <algorithm>

#include "rl/scores/episodes.h"

namespace lockstep::rl {
namespace {

// Of the tools that solve some of the tasks.
std::map<std::string, ToolScores> tool_scores(Tasks tasks) {
  std::map<std::string, ToolScores> out;
  for (const auto& tool : tools_of(tasks)) {
    ToolScores& scores = out[tool];
    double selected = 0, trials = 0, calls = 0, failed = 0, reward = 0, solved = 0;
    double told = 0, to_be_told = 0;
    for (const auto& task : tasks) {
      const auto wanted = std::count(task.gold.begin(), task.gold.end(), tool);
      for (const auto& trial : task.trials) {
        const auto made = std::count(trial.called.begin(), trial.called.end(), tool);
        calls += static_cast<double>(made);
        failed += static_cast<double>(std::count(trial.failed.begin(), trial.failed.end(), tool));
        if (made + wanted > 0) {
          selected +=
              2 * static_cast<double>(std::min(made, wanted)) / static_cast<double>(made + wanted);
          ++trials;
        }
        if (wanted == 0) continue;
        told += trial.told.value_or(false) ? 1 : 0;
        to_be_told += trial.told ? 1 : 0;
        reward += trial.reward;
        ++solved;
      }
    }
    scores = {.selection = selected / trials,
              .invocation = std::nullopt,
              .output_usage = std::nullopt,
              .success = reward / solved};
    if (to_be_told > 0) scores.output_usage = told / to_be_told;
    if (calls > 0) scores.invocation = (calls - failed) / calls;
  }
  return out;
}

std::optional<double> retention(const RunRecord& run, size_t stage) {
  std::vector<EvaluatedTask> first;
  for (size_t earlier = 0; earlier < stage; ++earlier) {
    const Tasks tasks = run.cells[stage + 1][earlier];
    const auto count = std::min<size_t>(tasks.size(), static_cast<size_t>(run.retention_tasks));
    first.insert(first.end(), tasks.begin(), tasks.begin() + static_cast<std::ptrdiff_t>(count));
  }
  return first.empty() ? std::nullopt : std::optional(mean_reward(first));
}

}  // namespace

StageScores scores_of_stage(const RunRecord& run, size_t stage) {
  const auto& row = run.cells[stage + 1];
  std::vector<EvaluatedTask> tasks = row[stage];
  for (size_t j = 1; j < run.joint_domains.size(); ++j) {
    tasks.insert(tasks.end(), row[j].begin(), row[j].end());
  }
  std::set<std::string> known;
  for (size_t earlier = 0; earlier < stage; ++earlier) {
    known.merge(tools_of(Tasks(run.cells[earlier + 1][earlier])));
  }
  StageScores out{.new_tool_success = mean_reward(
                      tasks,
                      [&](const auto& task) {
                        return std::any_of(task.gold.begin(), task.gold.end(),
                                           [&](const auto& tool) { return !known.contains(tool); });
                      }),
                  .retention = retention(run, stage),
                  .tools = tool_scores(tasks)};
  const auto trials = static_cast<int64_t>(tasks.front().trials.size());
  for (int64_t k = 1; k <= trials; ++k) {
    double sum = 0;
    for (const auto& task : tasks) sum += pass_hat_k(trials_of(task), k);
    out.pass_hat_k[k] = sum / static_cast<double>(tasks.size());
  }
  return out;
}

}  // namespace lockstep::rl
