// metrics.json.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "lockstep/core/error.h"
#include "rl/scores/episodes.h"

namespace lockstep::rl {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const std::optional<double>& value) { return value ? Json(*value) : Json(nullptr); }
Json json_of(const Interval& interval) { return {interval.low, interval.high}; }

// Of one stage that teaches all columns.
ContinualScores joint_scores(const std::vector<std::vector<double>>& r) {
  ContinualScores out{.acc = mean(r.back()), .learning_accuracy = mean(r.back())};
  for (size_t j = 0; j < r.back().size(); ++j) out.gain_per_stage.push_back(r[1][j] - r[0][j]);
  return out;
}

// The run's figures, T >= 1 stages checked.
class Metrics {
 public:
  explicit Metrics(const RunRecord& run)
      : run_(run),
        r_(reward_matrix(run)),
        scores_(is_joint() ? joint_scores(r_) : continual_scores(r_, run.other)) {}

  Json all() const {
    return {{"basic", basic()},
            {"continual_learning", continual_learning()},
            {"learning_efficiency", learning_efficiency()},
            {"generalization", generalization()},
            {"fine_grained", fine_grained()},
            {"matrix", matrix()},
            {"guides", guides()},
            {"protocol", protocol()},
            {"baselines", run_.baselines},
            {"null_agent",
             run_.baselines.contains("null") ? Json(run_.baselines.at("null")) : Json(nullptr)}};
  }

 private:
  bool is_joint() const { return !run_.joint_domains.empty(); }
  size_t stages() const { return run_.stages.size(); }
  size_t columns() const { return r_.front().size(); }
  // After the stage that taught column j.
  size_t own_row(size_t j) const { return is_joint() ? 1 : j + 1; }
  // Row i, column j, both from 0.
  Tasks cell(size_t i, size_t j) const { return run_.cells[i][j]; }
  Tasks final_of(size_t j) const { return cell(stages(), j); }
  std::vector<EvaluatedTask> final_tasks() const {
    std::vector<EvaluatedTask> all;
    for (size_t j = 0; j < columns(); ++j) {
      all.insert(all.end(), final_of(j).begin(), final_of(j).end());
    }
    return all;
  }

  Json basic() const {
    std::vector<double> own;
    for (size_t j = 0; j < columns(); ++j) own.push_back(r_[own_row(j)][j]);
    Json hat = Json::object();
    Json at = Json::object();
    const auto tasks = final_tasks();
    const auto trials = static_cast<int64_t>(tasks.front().trials.size());
    for (int64_t k = 1; k <= trials; ++k) {
      std::vector<double> hats;
      std::vector<double> ats;
      for (const auto& task : tasks) {
        hats.push_back(pass_hat_k(trials_of(task), k));
        ats.push_back(pass_at_k(trials_of(task), k));
      }
      hat[std::to_string(k)] = mean(hats);
      at[std::to_string(k)] = mean(ats);
    }
    Json json = {{"average_reward", mean(own)},
                 {"final_reward", r_.back().back()},
                 {"acc", scores_.acc},
                 {"pass_hat_k", hat},
                 {"pass_at_k", at}};
    if (trials == 1) {
      Trials all{.of = static_cast<int64_t>(tasks.size())};
      for (const auto& task : tasks) all.succeeded += trials_of(task).succeeded;
      json["pass_hat_1_ci95"] = json_of(wilson(all));
    }
    return json;
  }

  // What was forgotten of a tool: by test tasks whose solution calls it.
  Json continual_learning() const {
    Json forgotten = Json::object();
    Json kept = Json::object();
    std::set<std::string> tools;
    for (size_t j = 0; j < columns(); ++j) tools.merge(tools_of(final_of(j)));
    for (const auto& tool : tools) {
      std::optional<double> best;
      for (size_t i = 1; i < stages(); ++i) best = std::max(best, success(i, tool));
      if (!best) continue;
      const double last = *success(stages(), tool);
      forgotten[tool] = *best - last;
      if (const double most = std::max(*best, last); most > 0) kept[tool] = last / most;
    }
    Json forward = Json::array();   // null for the first stage
    Json backward = Json::array();  // and for the last one
    for (size_t j = 0; j < stages() && !is_joint(); ++j) {
      forward.push_back(j == 0 ? Json(nullptr) : Json(r_[j][j] - r_[0][j]));
      backward.push_back(j + 1 == stages() ? Json(nullptr) : Json(r_.back()[j] - r_[j + 1][j]));
    }
    return {{"forward_transfer", json_of(scores_.fwt)},
            {"forward_transfer_per_stage", forward},
            {"backward_transfer", json_of(scores_.bwt)},
            {"backward_transfer_per_stage", backward},
            {"average_forgetting", json_of(scores_.forgetting)},
            {"tool_level_forgetting", forgotten},
            {"tool_level_retention", kept}};
  }

  std::optional<double> success(size_t row, const std::string& tool) const {
    std::vector<EvaluatedTask> all;
    for (size_t j = 0; j < columns(); ++j) {
      all.insert(all.end(), cell(row, j).begin(), cell(row, j).end());
    }
    return mean_reward(all, [&](const auto& task) { return uses(task, tool); });
  }

  Json learning_efficiency() const {
    std::vector<double> areas, early, efficient;
    // null for a stage without a point
    Json areas_of_all = Json::array(), early_of_all = Json::array(),
         efficient_of_all = Json::array();
    const auto add = [](Json& of_all, std::vector<double>& known, double value) {
      known.push_back(value);
      of_all.back() = value;
    };
    for (const auto& stage : run_.stages) {
      for (Json* of_all : {&areas_of_all, &early_of_all, &efficient_of_all}) {
        of_all->push_back(nullptr);
      }
      if (stage.curve.empty()) continue;
      add(areas_of_all, areas, area_under(stage.curve));
      add(early_of_all, early, early_area(stage.curve));
      if (stage.episodes == 0) continue;
      add(efficient_of_all, efficient, areas.back() / static_cast<double>(stage.episodes));
    }
    const auto mean_of = [](const std::vector<double>& known) {
      return known.empty() ? Json(nullptr) : Json(mean(known));
    };
    return {{"learning_efficiency", mean_of(efficient)},
            {"learning_efficiency_per_stage", efficient_of_all},
            {"aulc", mean_of(areas)},
            {"aulc_training", mean_of(areas)},
            {"aulc_training_per_stage", areas_of_all},
            {"lca10", mean_of(early)},
            {"lca10_per_stage", early_of_all}};
  }

  Json generalization() const {
    const auto tasks = final_tasks();
    std::set<std::set<std::string>> trained;
    for (const auto& stage : run_.stages) {
      trained.insert(stage.training_tools.begin(), stage.training_tools.end());
    }
    Json json = Json::object();
    const auto composed =
        mean_reward(tasks, [&](const auto& task) { return !trained.contains(tools_of(task)); });
    if (composed) json["tool_composition"] = *composed;
    const auto argued = mean_reward(tasks, [](const auto& task) { return task.has_argument; });
    if (argued) json["parameter"] = *argued;
    json["cross_domain"] = json_of(scores_.cross_domain);
    return json;
  }

  Json fine_grained() const {
    const auto tasks = final_tasks();
    return {{"tool_selection", tool_selection(tasks)},
            {"tool_invocation", json_of(tool_invocation(tasks))},
            {"tool_output_usage", json_of(tool_output_usage(tasks))}};
  }

  // `of` the mean rewards of resampled tasks: the same tasks in every row of a column.
  Interval interval(
      const std::function<double(const std::vector<std::vector<double>>&)>& of) const {
    std::vector<int64_t> tasks;
    for (size_t j = 0; j < columns(); ++j) tasks.push_back(static_cast<int64_t>(cell(0, j).size()));
    std::vector<std::vector<std::vector<double>>> rewards(r_.size());
    for (size_t i = 0; i < r_.size(); ++i) {
      for (size_t j = 0; j < columns(); ++j) {
        rewards[i].emplace_back();
        for (const auto& task : cell(i, j)) rewards[i].back().push_back(reward_of(task));
      }
    }
    return bootstrap_columns(tasks, run_.seed, [&](const std::vector<std::vector<int64_t>>& drawn) {
      std::vector<std::vector<double>> means(r_.size(), std::vector<double>(columns()));
      for (size_t i = 0; i < r_.size(); ++i) {
        for (size_t j = 0; j < columns(); ++j) {
          double sum = 0;
          for (const int64_t task : drawn[j]) sum += rewards[i][j][static_cast<size_t>(task)];
          means[i][j] = sum / static_cast<double>(drawn[j].size());
        }
      }
      return of(means);
    });
  }

  Json matrix() const {
    Json domains = run_.joint_domains;
    Json cells = Json::array();
    for (size_t j = 0; !is_joint() && j < stages(); ++j) domains.push_back(run_.stages[j].domain);
    for (size_t i = 0; i < r_.size(); ++i) {
      cells.push_back(Json::array());
      for (size_t j = 0; j < columns(); ++j) {
        cells.back().push_back(json_of(interval([=](const auto& r) { return r[i][j]; })));
      }
    }
    Json json = {{"columns", domains},
                 {"R", r_},
                 {"R_ci95", cells},
                 {"acc", scores_.acc},
                 {"acc_ci95", json_of(interval([](const auto& r) { return mean(r.back()); }))},
                 {"bwt", json_of(scores_.bwt)},
                 {"fwt", json_of(scores_.fwt)},
                 {"forgetting", json_of(scores_.forgetting)},
                 {"learning_accuracy", scores_.learning_accuracy},
                 {"gain_per_stage", scores_.gain_per_stage}};
    if (scores_.fwt_random) json["fwt_random"] = *scores_.fwt_random;
    if (scores_.intransigence) json["intransigence"] = *scores_.intransigence;
    if (stages() > 1) {
      const auto of = [&](auto member) {
        return json_of(interval([=](const auto& r) { return *(continual_scores(r).*member); }));
      };
      json["bwt_ci95"] = of(&ContinualScores::bwt);
      json["fwt_ci95"] = of(&ContinualScores::fwt);
      json["forgetting_ci95"] = of(&ContinualScores::forgetting);
    }
    json["gain_per_stage_ci95"] = Json::array();
    for (size_t j = 0; j < columns(); ++j) {
      const size_t row = own_row(j);
      json["gain_per_stage_ci95"].push_back(
          json_of(interval([=](const auto& r) { return r[row][j] - r[row - 1][j]; })));
    }
    return json;
  }

  // The guides' own definitions, in which the runs of other programs are reported.
  Json guides() const {
    if (is_joint()) return {{"note", "not defined for a joint run"}};
    std::vector<double> forward;
    std::vector<double> backward;
    std::vector<double> efficiency;
    std::vector<double> own;
    Json pass = Json::object();
    int64_t episodes = 0;
    for (size_t j = 0; j < stages(); ++j) {
      const auto scores = scores_of_stage(run_, j);
      own.push_back(r_[j + 1][j]);
      forward.push_back(j == 0 ? 0 : scores.new_tool_success.value_or(0) - 0.5);
      backward.push_back(j == 0 ? 0 : scores.retention.value_or(0) - r_[1][0]);
      episodes += run_.stages[j].episodes;
      efficiency.push_back(run_.stages[j].episodes == 0
                               ? 0
                               : own.back() / static_cast<double>(run_.stages[j].episodes));
    }
    double area = 0;
    for (size_t j = 0; j + 1 < own.size(); ++j) area += (own[j] + own[j + 1]) / 2;
    area /= static_cast<double>(own.size());
    for (const auto* k : {"1", "4"}) pass[k] = mean(own);
    return {{"note", "not comparable"},
            {"forward_transfer", mean(forward)},
            {"forward_transfer_per_stage", forward},
            {"backward_transfer", mean(backward)},
            {"backward_transfer_per_stage", backward},
            {"average_forgetting", guides_forgetting()},
            {"aulc", area},
            {"learning_efficiency", episodes == 0 ? 0 : area / static_cast<double>(episodes)},
            {"learning_efficiency_per_stage", efficiency},
            {"pass_at_k", pass}};
  }

  double guides_forgetting() const {
    std::vector<double> lost;
    std::set<std::string> tools;
    for (size_t j = 0; j < stages(); ++j) tools.merge(tools_of(final_of(j)));
    for (const auto& tool : tools) {
      const auto uses_it = [&](const auto& task) { return uses(task, tool); };
      for (size_t j = 0; j < stages(); ++j) {
        // First measured after the stage that taught it.
        const auto first = mean_reward(cell(j + 1, j), uses_it);
        if (!first) continue;
        lost.push_back(*first - *success(stages(), tool));
        break;
      }
    }
    return mean(lost);
  }

  Json protocol() const {
    Json tasks = Json::array();
    for (size_t j = 0; j < columns(); ++j) tasks.push_back(final_of(j).size());
    return {
        {"stages", stages()}, {"n_tasks", tasks},  {"n_trials", final_of(0).front().trials.size()},
        {"resamples", 2000},  {"seed", run_.seed}, {"retention_tasks", run_.retention_tasks}};
  }

  const RunRecord& run_;
  std::vector<std::vector<double>> r_;
  ContinualScores scores_;
};

void check(const RunRecord& run) {
  const size_t stages = run.stages.size();
  const auto refuse = [](const std::string& why) { throw ConfigError("[rl] metrics: " + why); };
  if (stages == 0 || run.cells.size() != stages + 1) {
    refuse(fmt::format("{} stages and {} rows of cells: T stages need T + 1 rows", stages,
                       run.cells.size()));
  }
  if (!run.joint_domains.empty() && stages != 1) {
    refuse(fmt::format("a joint run has one stage, this one {}", stages));
  }
  const size_t columns = run.joint_domains.empty() ? stages : run.joint_domains.size();
  const auto name = [&](size_t j) {
    return run.joint_domains.empty() ? run.stages[j].domain : run.joint_domains[j];
  };
  size_t trials = 0;
  for (const auto& row : run.cells) {
    if (row.size() != columns) refuse(fmt::format("a row has {} of {} cells", row.size(), columns));
    for (size_t j = 0; j < columns; ++j) {
      const auto& first = run.cells.front()[j];
      if (row[j].empty() || row[j].size() != first.size()) {
        refuse(fmt::format("{} tasks of {} in one row and {} in another", row[j].size(), name(j),
                           first.size()));
      }
      for (size_t k = 0; k < row[j].size(); ++k) {
        const auto& task = row[j][k];
        if (trials == 0) trials = task.trials.size();
        if (task.id != first[k].id || task.trials.size() != trials || trials == 0) {
          refuse(
              fmt::format("task {} of {} has {} trials, and {} elsewhere; each row has the same "
                          "tasks, and each task as many trials",
                          task.id, name(j), task.trials.size(), trials));
        }
      }
    }
  }
}

}  // namespace

std::vector<std::vector<double>> reward_matrix(const RunRecord& run) {
  check(run);
  std::vector<std::vector<double>> r;
  for (const auto& row : run.cells) {
    r.emplace_back();
    for (const auto& tasks : row) r.back().push_back(mean_reward(tasks));
  }
  return r;
}

StageScores stage_scores(const RunRecord& run, size_t stage) {
  check(run);
  if (stage >= run.stages.size()) {
    throw ConfigError(fmt::format("[rl] stage {} of a run with {}", stage, run.stages.size()));
  }
  return scores_of_stage(run, stage);
}

std::string metrics_json(const RunRecord& run) { return Metrics(run).all().dump(2) + "\n"; }

}  // namespace lockstep::rl
