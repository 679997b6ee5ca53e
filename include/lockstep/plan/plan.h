// The answer to "DDP or FSDP?" for one model on one machine. Needs no torch.
//
//   const auto machine = plan::Machine{.device = plan::device_named("a100-80gb"), ...};
//   std::cout << plan::plan_text(plan::make_plan(profile, training, machine, {.ranks = 16}));
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/plan/strategy.h"

namespace lockstep::plan {

// One strategy on one number of ranks.
struct PlanRow {
  Strategy strategy = Strategy::Ddp;
  int64_t ranks = 1;
  Memory memory;
  StepTime time;
  double samples_per_second = 0;  // of all ranks together
  // The rate, as a share of `ranks` times the rate of one rank alone, were its memory enough.
  // Above 1 where ranks shard the update.
  double efficiency = 0;
};

// For how many ranks to plan.
struct PlanOptions {
  int64_t ranks = 0;  // 0: those of one node, at most one for each lane
  std::optional<Strategy> configured = std::nullopt;  // what the user has asked for
  // The same model computing in 16 bits, where it does not yet; without it that is no remedy.
  std::optional<ModelProfile> narrow = std::nullopt;
};

// A change of the training with which each rank needs less memory.
struct Remedy {
  std::string change;                 // "sgd instead of Adam (optimizer: sgd)"
  Strategy strategy = Strategy::Ddp;  // that needs the least with it
  Memory memory;
  int64_t least_ranks = 0;  // as the plan's, with it
};

// Strategies compared, and the advice.
struct Plan {
  ModelProfile model;
  Training training;
  Machine machine;
  int64_t ranks = 1;
  std::optional<Strategy> configured;
  std::vector<PlanRow> strategies;  // all, on `ranks`
  // The fastest that fits, but a simpler one unless that is 5 % slower.
  std::optional<PlanRow> best;
  std::vector<PlanRow> sizes;  // the best one on 1, 2, 4, ... ranks, as far as any fits
  int64_t most_tried = 0;      // of these ranks: 131,072, or the lanes where there are fewer
  // The fewest ranks (a power of two) on which anything fits; 0: none up to `most_tried`.
  int64_t least_ranks = 0;
  // The fewest ranks (a power of two) on which the best one spends more time on communication and
  // waiting than on computation; 0: none up to `most_tried`.
  int64_t knee = 0;
  // Where nothing fits: each change with which something does. Where there is none, those that save
  // most, each with the ones before it, until something fits or less than a twentieth is saved.
  std::vector<Remedy> remedies;
};

// Throws ConfigError for fewer than 1 or more than 1,048,576 ranks, more ranks than lanes, sizes
// below 1 and measured times that are negative or not finite.
Plan make_plan(const ModelProfile& model, const Training& training, const Machine& machine,
               const PlanOptions& options = {});

// The plan in words and tables, of at most `width` columns (0: tables
// as wide as they are).
std::string plan_text(const Plan& plan, int width = 100);
// One JSON object; bytes and seconds.
std::string plan_json(const Plan& plan);

}  // namespace lockstep::plan
