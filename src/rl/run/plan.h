// What a run does, one unit after another; the same on every rank, known from the beginning.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/rl/environment.h"
#include "lockstep/rl/learner.h"
#include "lockstep/rl/run.h"

namespace lockstep::rl {

// A column of the matrix.
struct ColumnPlan {
  std::string domain;  // "airline"
  std::vector<TaskKey> learning, evaluation;
};

// A stage, which teaches one of the columns, or, in a joint run, all of them.
struct StagePlan {
  std::string id;      // "stage_1_airline"
  std::string domain;  // "airline"; "joint"
  std::vector<TaskKey> learning;
  int64_t iterations = 0;
};

// A joint run has one stage, others one for each column, in the same order.
struct Curriculum {
  std::vector<StagePlan> stages;
  std::vector<ColumnPlan> columns;
  bool is_joint() const { return stages.size() != columns.size(); }
};

// One thing that is done between two chances to save.
struct Unit {
  enum class Kind { Evaluate, Learn };
  Kind kind = Kind::Evaluate;
  int64_t stage = 0;        // Learn: which; Evaluate: stages so far
  int64_t number = 0;       // Learn: iteration; Evaluate: column
  bool ends_stage = false;  // the last evaluation after a stage
  int64_t iterations = 0;   // Evaluate: of the last of these stages
};

Curriculum plan_curriculum(const Course& course, const RunOptions& options);
std::vector<Unit> plan_units(const Curriculum& curriculum);

// What it is, for people: "stage_1_airline iteration 3 of 30".
std::string text_of(const Unit& unit, const Curriculum& curriculum);

// The episodes of an iteration or evaluation, groups one after another.
RolloutPlan plan_learning(const Curriculum& curriculum, const Course& course,
                          const RunOptions& options, const Unit& unit);
RolloutPlan plan_evaluation(const Curriculum& curriculum, const RunOptions& options,
                            int64_t column);

// curriculum.json
std::string curriculum_json(const Curriculum& curriculum, const RunOptions& options);

}  // namespace lockstep::rl
