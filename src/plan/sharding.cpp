#include "plan/sharding.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>

#include "core/divided_up.h"
#include "lockstep/core/error.h"
#include "plan/sizes.h"

namespace lockstep::plan {
namespace {

constexpr double kPage = 4096, kHugePage = 2 << 20;

// Of the rank that has the most.
int64_t own_lanes(const Training& training, int64_t ranks) {
  return std::max<int64_t>(1, divided_up(training.lanes, ranks));
}

}  // namespace

bool is_fsdp(Strategy strategy) { return strategy != Strategy::Ddp && strategy != Strategy::Zero; }

bool is_hybrid(Strategy strategy) {
  return strategy == Strategy::FsdpHybrid || strategy == Strategy::FsdpHybridGradients;
}

bool keeps_parameters(Strategy strategy) {
  return strategy == Strategy::FsdpGradients || strategy == Strategy::FsdpHybridGradients;
}

Training under(Training training, Strategy strategy) {
  if (training.only_fsdp_recomputes && !is_fsdp(strategy)) {
    training.recomputed = Recomputed::Nothing;
  }
  return training;
}

void check_training(const Training& training, const Machine& machine, int64_t ranks,
                    const char* who) {
  const auto refuse = [who](const std::string& what) {
    throw ConfigError(fmt::format("[{}] {}", who, what));
  };
  const auto is_time = [](double seconds) { return std::isfinite(seconds) && seconds >= 0; };
  if (ranks < 1 || ranks > kMostRanks) {
    refuse(fmt::format("{} ranks: give 1 to {}", ranks, kMostRanks));
  }
  if (machine.devices_per_node < 1) {
    refuse(fmt::format("{} devices a node: give at least 1", machine.devices_per_node));
  }
  if (training.evaluation_batch.value_or(0) < 0) {
    refuse(
        fmt::format("batches of {} in evaluations: give at least 0", *training.evaluation_batch));
  }
  if (training.batch < 1) refuse(fmt::format("a batch of {}: give at least 1", training.batch));
  if (training.batch > kMostSamples) {
    refuse(fmt::format("a batch of {}: give at most {}", training.batch, kMostSamples));
  }
  if (training.accumulation < 1) {
    refuse(fmt::format("{} micro-batches: give at least 1", training.accumulation));
  }
  if (training.accumulation > kMostSamples) {
    refuse(fmt::format("{} micro-batches: give at most {}", training.accumulation, kMostSamples));
  }
  if (training.lanes < 0) refuse(fmt::format("{} lanes: give 0 or more", training.lanes));
  if (training.lanes > kMostSamples) {
    refuse(fmt::format("{} lanes: give at most {}", training.lanes, kMostSamples));
  }
  if (!is_time(training.measured_step) || !is_time(training.measured_pass)) {
    refuse(
        fmt::format("measured seconds of {} (step) and {} (pass): give finite numbers above 0, "
                    "or 0 for an estimate",
                    training.measured_step, training.measured_pass));
  }
  if (training.lanes > 0 && ranks > training.lanes) {
    refuse(
        fmt::format("parallel.lanes = {} on {} ranks: each rank needs a lane, and a run refuses "
                    "more ranks; give --ranks of at most {}, or more lanes",
                    training.lanes, ranks, training.lanes));
  }
}

int64_t shard_ranks(Strategy strategy, const Machine& machine, int64_t ranks) {
  return is_hybrid(strategy) ? std::min(ranks, machine.devices_per_node) : ranks;
}

bool shares_parameters(const Machine& machine, const Ranks& ranks) {
  return machine.device.shares_memory && ranks.nodes() == 1;
}

double meeting_seconds(const Machine& machine, const Ranks& ranks) {
  return shares_parameters(machine, ranks) ? all_reduce_seconds(machine, ranks, 1) : 0;
}

double telling_seconds(const ModelProfile& model, const Machine& machine, const Ranks& ranks) {
  constexpr double kTold = 4 * kFloat;  // of each parameter
  return all_reduce_seconds(machine, ranks, kTold * static_cast<double>(parameters_of(model)));
}

size_t parameters_of(const ModelProfile& model) {
  size_t parameters = 0;
  for (const auto& unit : model.units) parameters += unit.parameters.size();
  return parameters;
}

bool is_twice(const ProfileUnit& unit, const Training& training) {
  return training.recomputed == Recomputed::Blocks && unit.is_block && unit.has_backward;
}

double passes_through(const ProfileUnit& unit, const Training& training) {
  return 1 + unit.backward_passes() + (is_twice(unit, training) ? 1 : 0);
}

int64_t passes_of(const Training& training, int64_t ranks) {
  return training.accumulation * own_lanes(training, ranks);
}

double samples_of(const Training& training, int64_t ranks) {
  const int64_t parts = training.lanes > 0 ? training.lanes : ranks;
  return static_cast<double>(parts) * static_cast<double>(training.batch) *
         static_cast<double>(training.accumulation);
}

int64_t lane_slots(const Training& training, int64_t ranks) {
  const auto own = static_cast<uint64_t>(own_lanes(training, ranks));
  const int64_t levels = std::max<int64_t>(1, std::bit_width(own - 1));
  return levels + (training.lanes % ranks == 0 ? 0 : 1);
}

std::vector<BucketSize> bucket_sizes(const ModelProfile& model, const Training& training) {
  std::vector<BucketSize> buckets;
  BucketSize filled;
  for (auto unit = model.units.rbegin(); unit != model.units.rend(); ++unit) {
    for (auto parameter = unit->parameters.rbegin(); parameter != unit->parameters.rend();
         ++parameter) {
      const double bytes = kFloat * static_cast<double>(*parameter);
      filled = {filled.bytes + bytes, std::max(filled.largest, bytes)};
      if (filled.bytes < (buckets.empty() ? kFirstBucket : training.bucket_bytes)) continue;
      buckets.push_back(filled);
      filled = {};
    }
  }
  if (filled.bytes > 0) buckets.push_back(filled);
  return buckets;
}

double shared_memory_bytes(double bytes) {
  const double unit = bytes >= kHugePage ? kHugePage : kPage;
  return std::ceil(bytes / unit) * unit;
}

}  // namespace lockstep::plan
