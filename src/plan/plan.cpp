#include "lockstep/plan/plan.h"

#include <algorithm>
#include <array>

#include "plan/sharding.h"

namespace lockstep::plan {
namespace {

constexpr std::array kAll = {Strategy::Ddp,
                             Strategy::Zero,
                             Strategy::FsdpGradients,
                             Strategy::FsdpFull,
                             Strategy::FsdpHybridGradients,
                             Strategy::FsdpHybrid};
constexpr int64_t kMostTried = 1 << 17;
// What a strategy has to gain on a simpler one to be chosen. Sharding the model changes the
// program, its checkpoints and what can be done to parameters, and a step's time is known to a
// tenth.
constexpr double kClearGain = 1.10, kGainWithinKind = 1.05;

PlanRow row_of(const ModelProfile& model, const Training& training, const Machine& machine,
               Strategy strategy, int64_t ranks) {
  PlanRow row{.strategy = strategy, .ranks = ranks};
  row.memory = memory_of(model, training, strategy, machine, ranks);
  row.time = time_of(model, training, strategy, machine, ranks);
  row.samples_per_second = samples_of(training, ranks) / row.time.total;
  const double alone =
      samples_of(training, 1) / time_of(model, training, Strategy::Ddp, machine, 1).total;
  row.efficiency = row.samples_per_second / (static_cast<double>(ranks) * alone);
  return row;
}

// Those that mean something on this many ranks.
std::vector<PlanRow> rows_on(const ModelProfile& model, const Training& training,
                             const Machine& machine, int64_t ranks) {
  std::vector<PlanRow> rows;
  for (const Strategy strategy : kAll) {
    if (ranks == 1 && strategy != Strategy::Ddp) continue;
    if (is_hybrid(strategy) &&
        (ranks <= machine.devices_per_node || ranks % machine.devices_per_node != 0)) {
      continue;
    }
    rows.push_back(row_of(model, training, machine, strategy, ranks));
  }
  return rows;
}

std::optional<PlanRow> best_of(const std::vector<PlanRow>& rows) {
  std::optional<PlanRow> best;
  for (const auto& row : rows) {  // simplest first
    if (!row.memory.fits()) continue;
    if (!best) {
      best = row;
      continue;
    }
    const bool divides = is_fsdp(row.strategy) && !is_fsdp(best->strategy);
    const double gain = divides ? kClearGain : kGainWithinKind;
    if (row.time.total * gain < best->time.total) best = row;
  }
  return best;
}

}  // namespace

Plan make_plan(const ModelProfile& model, const Training& training, const Machine& machine,
               const PlanOptions& options) {
  Plan plan{.model = model, .training = training, .machine = machine};
  const bool has_lanes = training.lanes > 0;  // each rank needs one
  plan.ranks = options.ranks != 0 ? options.ranks
               : has_lanes        ? std::min(machine.devices_per_node, training.lanes)
                                  : machine.devices_per_node;
  plan.configured = options.configured;
  check_training(training, machine, plan.ranks, "plan");
  plan.most_tried = has_lanes ? std::min(kMostTried, training.lanes) : kMostTried;
  plan.strategies = rows_on(model, training, machine, plan.ranks);
  plan.best = best_of(plan.strategies);
  for (int64_t ranks = 1; ranks <= plan.most_tried; ranks *= 2) {
    const auto best = best_of(rows_on(model, training, machine, ranks));
    if (!best) continue;
    if (plan.least_ranks == 0) plan.least_ranks = ranks;
    plan.sizes.push_back(*best);
    if (plan.knee == 0 && best->time.communication_share() > 0.5) plan.knee = ranks;
  }
  return plan;
}

}  // namespace lockstep::plan
