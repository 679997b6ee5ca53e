#include "lockstep/plan/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <utility>

#include "core/divided_up.h"
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
// What a strategy has to gain on a simpler one to be chosen: none is faster than the chosen one by
// more.
constexpr double kClearGain = 1.05;
constexpr double kClearSaving = 0.95;  // what is left of the memory by a change worth naming

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
std::vector<Strategy> strategies_on(const Machine& machine, int64_t ranks) {
  if (ranks == 1) return {Strategy::Ddp};
  const bool is_divided = ranks > machine.devices_per_node && ranks % machine.devices_per_node == 0;
  std::vector<Strategy> strategies;
  for (const Strategy strategy : kAll) {
    if (!is_hybrid(strategy) || is_divided) strategies.push_back(strategy);
  }
  return strategies;
}

std::vector<PlanRow> rows_on(const ModelProfile& model, const Training& training,
                             const Machine& machine, int64_t ranks) {
  std::vector<PlanRow> rows;
  for (const Strategy strategy : strategies_on(machine, ranks)) {
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
    if (row.time.total * kClearGain < best->time.total) best = row;
  }
  return best;
}

// What is trained, and how: the plan's, or with changes.
struct Trained {
  const ModelProfile* model;
  Training training;
};

// The strategy that needs the least.
Remedy least_on(const Trained& trained, const Machine& machine, int64_t ranks) {
  Remedy least;
  for (const Strategy strategy : strategies_on(machine, ranks)) {
    const auto memory = memory_of(*trained.model, trained.training, strategy, machine, ranks);
    if (least.memory.total > 0 && memory.total >= least.memory.total) continue;
    least.strategy = strategy;
    least.memory = memory;
  }
  return least;
}

// Makes the change, and says what to write for it.
using Change = std::function<std::string(Trained&)>;

// Those that are possible; first those that change the result least.
std::vector<Change> changes_of(const Plan& plan, const ModelProfile* narrow) {
  const Training& given = plan.training;
  std::vector<Change> changes;
  if (given.evaluation_batch.value_or(0) > given.batch) {
    changes.emplace_back([](Trained& trained) {
      trained.training.evaluation_batch = 0;
      return fmt::format("smaller batches in evaluations (training.eval_batch_size: {})",
                         trained.training.batch);
    });
  }
  if (given.batch > 1) {  // halves of it until it fits, with as many samples a step
    changes.emplace_back([&](Trained& trained) {
      int64_t &batch = trained.training.batch, &accumulation = trained.training.accumulation;
      const int64_t before = batch * accumulation;
      const bool evaluates_more = given.evaluation_batch.value_or(0) > batch;
      if (evaluates_more) trained.training.evaluation_batch = 0;
      for (int64_t parts = 2; batch > 1; parts *= 2) {
        batch = divided_up(given.batch, parts);
        accumulation = given.accumulation * divided_up(given.batch, batch);
        if (least_on(trained, plan.machine, plan.ranks).memory.fits()) break;
      }
      const int64_t samples = batch * accumulation;
      return fmt::format("{}training.batch_size: {} and gradient_accumulation_steps: {}{}",
                         evaluates_more ? "training.eval_batch_size: 0, " : "", batch, accumulation,
                         samples == before ? ""
                                           : fmt::format(" ({} samples a rank and step instead of "
                                                         "{})",
                                                         samples, before));
    });
  }
  const bool has_blocks = std::ranges::any_of(plan.model.units, &ProfileUnit::is_block);
  if (given.recomputed != Recomputed::Blocks && has_blocks) {
    changes.emplace_back([](Trained& trained) {
      trained.training.recomputed = Recomputed::Blocks;
      return fmt::format("activations computed twice ({}, or --recompute)",
                         trained.training.only_fsdp_recomputes
                             ? "parallel.strategy: fsdp and "
                               "parallel.fsdp.activation_checkpointing: true"
                             : "training.activation_checkpointing: full");
    });
  }
  if (given.precision == Precision::Float && narrow != nullptr) {
    // GPUs without bfloat16 compute in float16; CPUs without it take it all the same.
    const Device& device = plan.machine.device;
    const bool is_bf16 = device.has_bf16 || device.shares_memory;
    changes.emplace_back([narrow, is_bf16](Trained& trained) {
      trained.model = narrow;
      trained.training.precision = Precision::Narrow;
      return fmt::format("16 bits (mixed_precision: {})", is_bf16 ? "bf16" : "fp16");
    });
  }
  if (given.state_bytes > 0) {
    changes.emplace_back([](Trained& trained) {
      return std::exchange(trained.training.state_bytes, 0) > 4
                 ? "sgd instead of Adam (optimizer: sgd)"
                 : "sgd without momentum (optimizer.momentum: 0)";
    });
  }
  return changes;
}

std::vector<Remedy> remedies_of(const Plan& plan, const ModelProfile* narrow) {
  Trained now = {&plan.model, plan.training};
  const auto with = [&](const Change& change) {
    Trained changed = now;
    std::string text = change(changed);
    Remedy remedy = least_on(changed, plan.machine, plan.ranks);
    remedy.change = std::move(text);
    for (int64_t n = 1; n <= plan.most_tried && remedy.least_ranks == 0; n *= 2) {
      if (least_on(changed, plan.machine, n).memory.fits()) remedy.least_ranks = n;
    }
    return remedy;
  };
  auto changes = changes_of(plan, narrow);
  std::vector<Remedy> remedies;
  for (const Change& change : changes) {
    if (const Remedy one = with(change); one.memory.fits()) remedies.push_back(one);
  }
  if (!remedies.empty()) return remedies;
  Memory memory = least_on(now, plan.machine, plan.ranks).memory;
  while (!changes.empty() && !memory.fits()) {
    const auto total = [&](const Change& change) { return with(change).memory.total; };
    const auto best = std::ranges::min_element(changes, {}, total);
    const Remedy remedy = with(*best);
    if (remedy.memory.total > kClearSaving * memory.total) break;
    remedies.push_back(remedy);
    memory = remedy.memory;
    (*best)(now);
    changes.erase(best);
  }
  return remedies;
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
  if (!plan.best) plan.remedies = remedies_of(plan, options.narrow ? &*options.narrow : nullptr);
  return plan;
}

}  // namespace lockstep::plan
