// Where a run stands: what a checkpoint remembers beside parameters and the optimizer.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/rl/run.h"
#include "lockstep/rl/scores.h"

namespace lockstep::rl {

// Seconds of the first rank, by what they were spent on. Not part of what a run repeats.
using Seconds = std::map<std::string, double>;

// One iteration, as curves show it. Without times, which differ from rank to rank.
struct CurvePoint {
  int64_t stage = 0, iteration = 0;
  // On the stage's own tasks, without those that are replayed; nothing where it played none.
  std::optional<double> own_reward = {};
  Learnt learnt;
};

// The same on all ranks.
struct RunState {
  int64_t position = 0;    // units that are done
  int64_t iterations = 0;  // of all stages
  int64_t log_lines = 0;   // of trajectories.jsonl
  std::vector<std::vector<Cell>> rows;
  std::vector<CurvePoint> curve;
  std::vector<std::vector<int64_t>> ends;  // by stage: how many learning episodes ended how
  std::vector<Seconds> seconds;            // by stage, up to the last save and since
  // When the run began (UTC), and the seconds of all its processes up to the last save. Empty in
  // states of before 0.1.0.
  std::string started = {};
  Seconds all_seconds = {};

  std::string to_json() const;
  static RunState from_json(const std::string& text);
};

// A trial as one line of text.
std::string to_json(const EvaluatedTrial& trial);
EvaluatedTrial trial_from_json(const std::string& text);

}  // namespace lockstep::rl
