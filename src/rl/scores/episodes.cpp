#include "rl/scores/episodes.h"

#include <algorithm>
#include <map>

namespace lockstep::rl {
namespace {

template <class Value>
double mean_of_trials(Tasks tasks, const Value& value) {
  double sum = 0;
  double count = 0;
  for (const auto& task : tasks) {
    for (const auto& trial : task.trials) {
      sum += value(task, trial);
      ++count;
    }
  }
  return count == 0 ? 0 : sum / count;
}

double f1(const EvaluatedTask& task, const EvaluatedTrial& trial) {
  if (task.gold.empty() && trial.called.empty()) return 1;
  std::map<std::string, int> left;
  for (const auto& name : task.gold) ++left[name];
  double both = 0;
  for (const auto& name : trial.called) both += left[name]-- > 0;
  return 2 * both / static_cast<double>(task.gold.size() + trial.called.size());
}

}  // namespace

double reward_of(const EvaluatedTask& task) { return mean_reward(Tasks(&task, 1)); }

double mean_reward(Tasks tasks) {
  return mean_of_trials(tasks, [](const auto&, const auto& trial) { return trial.reward; });
}

std::optional<double> mean_reward(Tasks tasks,
                                  const std::function<bool(const EvaluatedTask&)>& chosen) {
  std::vector<EvaluatedTask> some;
  std::copy_if(tasks.begin(), tasks.end(), std::back_inserter(some), chosen);
  return some.empty() ? std::nullopt : std::optional(mean_reward(some));
}

Trials trials_of(const EvaluatedTask& task) {
  const auto succeeded =
      std::count_if(task.trials.begin(), task.trials.end(),
                    [](const EvaluatedTrial& trial) { return trial.reward >= 1; });
  return {.succeeded = succeeded, .of = static_cast<int64_t>(task.trials.size())};
}

bool uses(const EvaluatedTask& task, const std::string& tool) {
  return std::find(task.gold.begin(), task.gold.end(), tool) != task.gold.end();
}

std::set<std::string> tools_of(const EvaluatedTask& task) {
  return {task.gold.begin(), task.gold.end()};
}

std::set<std::string> tools_of(Tasks tasks) {
  std::set<std::string> tools;
  for (const auto& task : tasks) tools.insert(task.gold.begin(), task.gold.end());
  return tools;
}

double tool_selection(Tasks tasks) { return mean_of_trials(tasks, f1); }

std::optional<double> tool_invocation(Tasks tasks) {
  double calls = 0;
  double good = 0;
  for (const auto& task : tasks) {
    for (const auto& trial : task.trials) {
      calls += static_cast<double>(trial.calls);
      good += static_cast<double>(trial.good_calls);
    }
  }
  return calls == 0 ? std::nullopt : std::optional(good / calls);
}

std::optional<double> tool_output_usage(Tasks tasks) {
  double told = 0;
  double count = 0;
  for (const auto& task : tasks) {
    for (const auto& trial : task.trials) {
      if (!trial.told) continue;
      told += *trial.told ? 1 : 0;
      ++count;
    }
  }
  return count == 0 ? std::nullopt : std::optional(told / count);
}

}  // namespace lockstep::rl
