// What a run does, one unit after another; the same on every rank, known from the begin.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/rl/environment.h"
#include "lockstep/rl/learner.h"
#include "lockstep/rl/run.h"

namespace lockstep::rl {

// A stage of the curriculum.
struct StagePlan {
  std::string id;      // "stage_1_airline"
  std::string domain;  // "airline"
  std::vector<TaskKey> learning, evaluation;
  int64_t iterations = 0;
};

// One thing that is done between two chances to save.
struct Unit {
  enum class Kind { Evaluate, Learn };
  Kind kind = Kind::Evaluate;
  int64_t stage = 0;        // Learn: which; Evaluate: stages so far
  int64_t number = 0;       // Learn: iteration; Evaluate: column
  bool ends_stage = false;  // the last evaluation after a stage
};

std::vector<StagePlan> plan_stages(const Course& course, const RunOptions& options);
std::vector<Unit> plan_units(const std::vector<StagePlan>& stages);

// The episodes of an iteration or evaluation, groups one after another.
RolloutPlan plan_learning(const std::vector<StagePlan>& stages, const RunOptions& options,
                          const Unit& unit);
RolloutPlan plan_evaluation(const std::vector<StagePlan>& stages, const RunOptions& options,
                            int64_t column);

// curriculum.json
std::string curriculum_json(const std::vector<StagePlan>& stages, const RunOptions& options);

}  // namespace lockstep::rl
