#include "rl/run/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/divided_up.h"
#include "core/hash/counter.h"
#include "lockstep/core/error.h"

namespace lockstep::rl {
namespace {

using Json = nlohmann::ordered_json;

// What numbers are drawn for.
enum Purpose : uint64_t {
  kSample = 0x5A3,
  kEvaluation = 0xE7A,
  kOrder = 0x04D,
  kReplay = 0x4E9,
  kRamp = 0x4A3
};

uint64_t as_unsigned(int64_t value) { return static_cast<uint64_t>(value); }

// An endless walk over the pool, in a new order each time.
class Walk {
 public:
  Walk(const std::vector<TaskKey>& pool, uint64_t seed, uint64_t stage)
      : pool_(&pool), seed_(seed), stage_(stage), order_(pool.size()) {}

  // The n-th task. Cheap while n stays within one pass.
  const TaskKey& operator[](uint64_t n) {
    const uint64_t pass = n / pool_->size();
    if (pass_ != pass) shuffle(pass);
    return (*pool_)[order_[n % pool_->size()]];
  }

 private:
  // The first pass in the order of the tasks, as the guides have it.
  void shuffle(uint64_t pass) {
    std::iota(order_.begin(), order_.end(), size_t{0});
    for (size_t i = order_.size(); pass > 0 && i > 1; --i) {
      std::swap(order_[i - 1], order_[counter(seed_, kOrder, stage_, pass, i) % i]);
    }
    pass_ = pass;
  }

  const std::vector<TaskKey>* pool_;
  uint64_t seed_, stage_;
  std::vector<size_t> order_;
  uint64_t pass_ = std::numeric_limits<uint64_t>::max();  // no order yet
};

Json keys_json(const std::vector<TaskKey>& keys) {
  Json out = Json::array();
  for (const auto& key : keys) {
    out.push_back({{"domain", key.domain}, {"split", key.split}, {"id", key.id}});
  }
  return out;
}

ColumnPlan plan_column(const Course& course, const RunOptions& options, const std::string& domain) {
  const auto arena = course.arenas.find(domain);
  if (arena == course.arenas.end()) {
    std::string known;
    for (const auto& [name, unused] : course.arenas) known += (known.empty() ? "" : ", ") + name;
    throw ConfigError(
        fmt::format("[three_domain] --order names the domain {}; there are {}", domain, known));
  }
  const auto first = [&](const char* split, int64_t count) {
    auto tasks = arena->second.domain->tasks(split);
    tasks.resize(std::min(tasks.size(), static_cast<size_t>(count)));
    if (tasks.empty()) {
      throw ConfigError(fmt::format("[three_domain] the domain {} has no {} tasks", domain, split));
    }
    return tasks;
  };
  return {.domain = domain,
          .learning = first("train", options.learning_tasks()),
          .evaluation = first("test", options.evaluation_tasks())};
}

// Of a stage with these tasks.
int64_t iterations_of(const RunOptions& options, const std::vector<TaskKey>& learning) {
  if (options.iterations > 0) return options.iterations;
  return divided_up(static_cast<int64_t>(learning.size()), options.prompts);
}

// Whether a task of this iteration is of the first level: with a probability that falls from 1 to 0
// over the first iterations.
bool is_easier(const RunOptions& options, uint64_t stage, const Unit& unit, uint64_t prompt) {
  if (unit.number >= options.ramp) return false;
  const double share = static_cast<double>(unit.number) / static_cast<double>(options.ramp);
  return unit_interval(counter(as_unsigned(options.seed), kRamp, stage, as_unsigned(unit.number),
                               prompt)) < 1 - share;
}

}  // namespace

Curriculum plan_curriculum(const Course& course, const RunOptions& options) {
  if (options.ramp > 0 && !course.easier) {
    throw ConfigError("[three_domain] --ramp: tasks of this course have one level of difficulty");
  }
  Curriculum out;
  for (const auto& domain : options.order) {
    out.columns.push_back(plan_column(course, options, domain));
    if (options.joint) continue;
    const auto& learning = out.columns.back().learning;
    out.stages.push_back({.id = fmt::format("stage_{}_{}", out.columns.size(), domain),
                          .domain = domain,
                          .learning = learning,
                          .iterations = iterations_of(options, learning)});
  }
  if (!options.joint) return out;
  StagePlan all{.id = "stage_1_joint", .domain = "joint"};
  for (size_t i = 0, left = 1; left > 0; ++i) {
    left = 0;
    for (const auto& column : out.columns) {
      if (i >= column.learning.size()) continue;
      all.learning.push_back(column.learning[i]);
      ++left;
    }
  }
  // As many as the stages of the run that it is compared with.
  for (const auto& column : out.columns) all.iterations += iterations_of(options, column.learning);
  out.stages.push_back(std::move(all));
  return out;
}

std::vector<Unit> plan_units(const Curriculum& curriculum) {
  std::vector<Unit> out;
  const auto columns = static_cast<int64_t>(curriculum.columns.size());
  const auto evaluate = [&](int64_t row) {
    const int64_t iterations = row > 0 ? curriculum.stages[as_unsigned(row - 1)].iterations : 0;
    for (int64_t j = 0; j < columns; ++j) {
      out.push_back({Unit::Kind::Evaluate, row, j, row > 0 && j + 1 == columns, iterations});
    }
  };
  evaluate(0);
  for (size_t s = 0; s < curriculum.stages.size(); ++s) {
    const auto stage = static_cast<int64_t>(s);
    for (int64_t it = 0; it < curriculum.stages[s].iterations; ++it) {
      out.push_back({Unit::Kind::Learn, stage, it, false});
    }
    evaluate(stage + 1);
  }
  return out;
}

std::string text_of(const Unit& unit, const Curriculum& curriculum) {
  const auto& stages = curriculum.stages;
  if (unit.kind == Unit::Kind::Learn) {
    const auto& stage = stages[as_unsigned(unit.stage)];
    return fmt::format("{} iteration {} of {}", stage.id, unit.number + 1, stage.iterations);
  }
  return fmt::format("evaluation of {} after {}",
                     curriculum.columns[as_unsigned(unit.number)].domain,
                     unit.stage == 0 ? "no stage" : stages[as_unsigned(unit.stage - 1)].id);
}

RolloutPlan plan_learning(const Curriculum& curriculum, const Course& course,
                          const RunOptions& options, const Unit& unit) {
  const auto& stages = curriculum.stages;
  RolloutPlan out{.group_size = options.group_size,
                  .lanes = options.lanes,
                  .timeout = std::chrono::seconds(options.rollout_timeout)};
  const auto seed = as_unsigned(options.seed), s = as_unsigned(unit.stage),
             it = as_unsigned(unit.number);
  Walk walk(stages[s].learning, seed, s);
  for (int64_t j = 0; j < options.prompts; ++j) {
    const auto number = as_unsigned(unit.number * options.prompts + j);
    const auto prompt = as_unsigned(j);
    TaskKey task = walk[number];
    if (is_easier(options, s, unit, prompt)) task = course.easier(task);
    if (s > 0 && unit_interval(counter(seed, kReplay, s, it, prompt, 0)) < options.replay) {
      const auto& pool = stages[counter(seed, kReplay, s, it, prompt, 1) % s].learning;
      task = pool[counter(seed, kReplay, s, it, prompt, 2) % pool.size()];
    }
    for (int64_t g = 0; g < options.group_size; ++g) {
      out.episodes.push_back({task, counter(seed, kSample, s, it, prompt, as_unsigned(g))});
    }
  }
  return out;
}

RolloutPlan plan_evaluation(const Curriculum& curriculum, const RunOptions& options,
                            int64_t column) {
  RolloutPlan out{.group_size = options.eval_trials,
                  .lanes = options.lanes,
                  .timeout = std::chrono::seconds(options.rollout_timeout)};
  const auto& tasks = curriculum.columns[as_unsigned(column)].evaluation;
  for (size_t task = 0; task < tasks.size(); ++task) {
    // Without the row, so that a task's trials after each stage draw the same numbers.
    for (int64_t trial = 0; trial < options.eval_trials; ++trial) {
      out.episodes.push_back({tasks[task], counter(as_unsigned(options.seed), kEvaluation,
                                                   as_unsigned(column), task, as_unsigned(trial))});
    }
  }
  return out;
}

std::string curriculum_json(const Curriculum& curriculum, const RunOptions& options) {
  Json out{{"version", 1}, {"stages", Json::array()}};
  std::vector<TaskKey> earlier;
  for (size_t s = 0; s < curriculum.stages.size(); ++s) {
    const auto& stage = curriculum.stages[s];
    std::vector<TaskKey> evaluation;
    for (size_t j = 0; j < curriculum.columns.size(); ++j) {
      if (j != s && !curriculum.is_joint()) continue;
      const auto& own = curriculum.columns[j].evaluation;
      evaluation.insert(evaluation.end(), own.begin(), own.end());
    }
    out["stages"].push_back({{"stage_id", stage.id},
                             {"domain", stage.domain},
                             {"learning_tasks", keys_json(stage.learning)},
                             {"evaluation_tasks", keys_json(evaluation)},
                             {"retention_tasks", keys_json(earlier)}});
    auto count = evaluation.size();
    if (options.retention_tasks > 0)
      count = std::min(count, static_cast<size_t>(options.retention_tasks));
    earlier.insert(earlier.end(), evaluation.begin(),
                   evaluation.begin() + static_cast<long>(count));
  }
  out["learning_ratio"] = options.learning_ratio;
  out["seed"] = options.seed;
  out["order"] = options.order;
  return out.dump(1) + "\n";
}

}  // namespace lockstep::rl
