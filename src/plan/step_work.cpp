// What a step of each strategy computes and sends.
#include <algorithm>

#include "lockstep/plan/strategy.h"
#include "plan/sharding.h"
#include "plan/sizes.h"

namespace lockstep::plan {
namespace {

constexpr double kCached = 16 << 20;  // bytes of a cache
// Seconds that Fsdp computes for each parameter and pass on a CPU, beside what Ddp does: 0.12 to
// 0.2 ms more for 4 parameters on one rank, 0.27 for 8. A GPU computes meanwhile.
constexpr double kShardedParameter = 30e-6;

// Of forward and backward: two thirds, more where backward computes forward again, and less where
// weights are frozen.
double backward_share(const ModelProfile& model, const Training& training) {
  double forward = 0, all = 0;
  for (const auto& unit : model.units) {
    forward += unit.flops;
    all += passes_through(unit, training) * unit.flops;
  }
  return all > 0 ? 1 - forward / all : 2.0 / 3;
}

// A measured pass, longer by the forwards that are made twice.
double measured_computation(const ModelProfile& model, const Training& training, int64_t passes) {
  double once = 0, again = 0;
  for (const auto& unit : model.units) {
    once += (1 + unit.backward_passes()) * unit.flops;
    if (is_twice(unit, training)) again += unit.flops;
  }
  return training.measured_pass * static_cast<double>(passes) * (once > 0 ? 1 + again / once : 1);
}

double computation(const ModelProfile& model, const Training& training, const Device& device,
                   int64_t count) {
  if (training.measured_pass > 0) return measured_computation(model, training, count);
  const bool narrow = training.precision == Precision::Narrow;
  const double rate = (narrow ? device.narrow_flops : device.float_flops) * device.efficiency;
  const auto samples = static_cast<double>(training.batch) * static_cast<double>(count);
  double seconds = 0;
  for (const auto& unit : model.units) {
    // What is kept is written once and read once, and its gradients as well.
    const double moved = 4 * (unit.kept * samples + unit.fixed_kept * static_cast<double>(count));
    const double passes = passes_through(unit, training);
    seconds += std::max(passes * unit.flops * samples / rate, moved / device.memory_bandwidth);
  }
  return seconds;
}

// All buckets but the last of backward, which nothing runs beside, and that one.
void add_buckets(StepWork& work, const ModelProfile& model, const Training& training,
                 const Machine& machine, const Ranks& ranks) {
  const auto buckets = bucket_sizes(model, training);
  const double share = static_cast<double>(training.sent_bytes) / kFloat;
  for (size_t i = 0; i < buckets.size(); ++i) {
    const double seconds = all_reduce_seconds(machine, ranks, share * buckets[i].bytes);
    (i + 1 < buckets.size() ? work.collectives : work.exposed) += seconds;
  }
}

// Units are gathered in every micro-batch; gradients are sent in the last one's backward.
void add_units(StepWork& work, const ModelProfile& model, const Training& training,
               Strategy strategy, const Machine& machine, const Ranks& all) {
  const Ranks shards = {.count = shard_ranks(strategy, machine, all.count),
                        .per_node = all.per_node};
  const bool gathers = !shares_parameters(machine, all);
  const double computed = training.precision == Precision::Narrow ? 2 : kFloat;
  const bool again = !keeps_parameters(strategy);
  const auto passes = static_cast<double>(passes_of(training, all.count));
  const double backward = work.computation * backward_share(model, training);
  work.last_overlappable = backward / passes;
  // Where backward gathers nothing only forward can have gathers beside it, and the last backward
  // what it sends.
  work.overlappable = again ? work.computation : work.computation - backward + backward / passes;
  double root = 0, root_gradients = 0;
  const auto gather = [&](double bytes) {
    return gathers ? all_gather_seconds(machine, shards, bytes) : 0;
  };
  // Each rank's part among the nodes; all ranks of a node at once, so its network moves all.
  const bool is_replicated = is_hybrid(strategy) && shards.count < all.count;
  const auto reduce = [&](double bytes) {
    if (bytes == 0) return 0.0;
    const Ranks nodes = {.count = all.nodes(), .per_node = 1};
    return reduce_scatter_seconds(machine, shards, bytes) +
           (is_replicated ? all_reduce_seconds(machine, nodes, bytes) : 0);
  };
  bool is_first = true;
  for (const auto& unit : model.units) {
    const double bytes = computed * static_cast<double>(unit.elements());
    const double gradients = computed * static_cast<double>(unit.trained());
    if (!unit.is_block) {
      root += bytes;
      root_gradients += gradients;
      continue;
    }
    const bool returns = again && unit.has_backward;
    const double one = gather(bytes), sent = reduce(gradients);
    const double last = (returns ? one : 0) + (is_first ? 0 : sent);
    work.last_collectives += last;
    work.collectives += last + (is_first ? 0 : passes * one) + (returns ? (passes - 1) * one : 0);
    // Nothing is computed before the first is there, and after its gradients are complete.
    if (is_first) work.exposed += passes * one + sent;
    is_first = false;
  }
  // The root is needed first, and its gradients are complete last.
  work.exposed += passes * gather(root) + reduce(root_gradients);
  work.exposed += static_cast<double>(training.accumulation) * meeting_seconds(machine, all) +
                  telling_seconds(model, machine, all);
}

}  // namespace

StepWork work_of(const ModelProfile& model, const Training& given, Strategy strategy,
                 const Machine& machine, int64_t count) {
  const Training training = under(given, strategy);
  const Ranks ranks = {.count = count, .per_node = machine.devices_per_node};
  StepWork work{.nodes = ranks.nodes()};
  work.computation = computation(model, training, machine.device, passes_of(training, count));
  const auto elements = static_cast<double>(model.trained());
  if (is_fsdp(strategy)) {
    add_units(work, model, training, strategy, machine, ranks);
  } else {
    // Only the last micro-batch's gradients are sent while backward continues.
    work.overlappable = work.computation * backward_share(model, training) /
                        static_cast<double>(passes_of(training, count));
    add_buckets(work, model, training, machine, ranks);
  }
  // The update reads and writes parameters and state, and reads gradients. What fits a cache is
  // there already, which is several times as fast.
  const double moved = elements * (3 * kFloat + 2 * static_cast<double>(training.state_bytes));
  const double bandwidth = machine.device.memory_bandwidth * (moved < kCached ? 4 : 1);
  const auto divided =
      static_cast<double>(strategy == Strategy::Ddp ? 1 : shard_ranks(strategy, machine, count));
  work.update = moved / divided / bandwidth;
  if (strategy == Strategy::Zero) {
    work.exposed += all_gather_seconds(machine, ranks, kFloat * elements);
  }
  if (training.measured_step > 0) {
    // Of one rank, on which nothing is sharded and nothing sent, and which computes all lanes.
    const double whole_update = std::min(moved / bandwidth, 0.5 * training.measured_step);
    const double measured = (training.measured_step - whole_update) *
                            static_cast<double>(passes_of(training, count)) /
                            static_cast<double>(passes_of(training, 1));
    const double longer = measured / std::max(work.computation, 1e-30);
    work.computation = measured;
    work.overlappable *= longer;
    work.last_overlappable *= longer;
    work.update = whole_update / divided;
  }
  if (is_fsdp(strategy) && machine.device.shares_memory) {
    work.computation += kShardedParameter * static_cast<double>(parameters_of(model)) *
                        static_cast<double>(passes_of(training, count));
  }
  return work;
}

StepTime time_of(const ModelProfile& model, const Training& training, Strategy strategy,
                 const Machine& machine, int64_t ranks) {
  return step_time(work_of(model, training, strategy, machine, ranks));
}

}  // namespace lockstep::plan
