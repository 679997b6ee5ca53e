#include "plan/sharding.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "plan/sizes.h"

namespace lockstep::plan {
namespace {

constexpr double kPage = 4096, kHugePage = 2 << 20;

// Of the rank that has the most.
int64_t own_lanes(const Training& training, int64_t ranks) {
  return std::max<int64_t>(1, (training.lanes + ranks - 1) / ranks);
}

}  // namespace

bool is_fsdp(Strategy strategy) { return strategy != Strategy::Ddp && strategy != Strategy::Zero; }

bool is_hybrid(Strategy strategy) {
  return strategy == Strategy::FsdpHybrid || strategy == Strategy::FsdpHybridGradients;
}

bool keeps_parameters(Strategy strategy) {
  return strategy == Strategy::FsdpGradients || strategy == Strategy::FsdpHybridGradients;
}

int64_t shard_ranks(Strategy strategy, const Machine& machine, int64_t ranks) {
  return is_hybrid(strategy) ? std::min(ranks, machine.devices_per_node) : ranks;
}

int64_t passes_of(const Training& training, int64_t ranks) {
  return training.accumulation * own_lanes(training, ranks);
}

double samples_of(const Training& training, int64_t ranks) {
  const int64_t parts = training.lanes > 0 ? training.lanes : ranks;
  return static_cast<double>(parts * training.batch * training.accumulation);
}

int64_t lane_slots(const Training& training, int64_t ranks) {
  const auto own = static_cast<uint64_t>(own_lanes(training, ranks));
  const int64_t levels = std::max<int64_t>(1, std::bit_width(own - 1));
  return levels + (training.lanes % ranks == 0 ? 0 : 1);
}

std::vector<double> bucket_sizes(const ModelProfile& model, const Training& training) {
  std::vector<double> buckets;
  double filled = 0;
  for (auto unit = model.units.rbegin(); unit != model.units.rend(); ++unit) {
    for (auto parameter = unit->parameters.rbegin(); parameter != unit->parameters.rend();
         ++parameter) {
      filled += kFloat * static_cast<double>(*parameter);
      if (filled < (buckets.empty() ? kFirstBucket : training.bucket_bytes)) continue;
      buckets.push_back(filled);
      filled = 0;
    }
  }
  if (filled > 0) buckets.push_back(filled);
  return buckets;
}

double shared_memory_bytes(double bytes) {
  const double unit = bytes >= kHugePage ? kHugePage : kPage;
  return std::ceil(bytes / unit) * unit;
}

}  // namespace lockstep::plan
