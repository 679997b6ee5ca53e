// What a loader has in common with its epochs and steps.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "data/loader/ahead.h"
#include "data/loader/batch_maker.h"
#include "lockstep/data/loader.h"

namespace lockstep::data {

struct Loader::Shared {
  std::shared_ptr<const Dataset> dataset;
  Shard part;  // with lanes, of the first that this rank runs
  LoaderOptions options;
  DistributedSampler sampler;
  SamplerState state = {};
  std::optional<SamplerState> restored = std::nullopt;
  Range lanes = {};  // that this rank runs; none without
};

constexpr const char* kPastEnd = "[loader] ++ past the end of an epoch: compare with end() first";

// Threads that make batches ahead, or none.
AheadPlan plan_of(int64_t count, const LoaderOptions& options);

// Starts the plan's threads. A child by fork() leaves it as it is: what the threads wait for cannot
// be destroyed there.
std::shared_ptr<Ahead<Batch>> start_ahead(Ahead<Batch>::Make make, const AheadPlan& plan);

// What a thread is to have as the one that made this.
class ThreadSettings {
 public:
  ThreadSettings();
  // Before another thread computes.
  void apply() const;

 private:
  std::vector<at::Device> current_;  // devices: a new thread has the first
};

Batch on_device(const Batch& batch, const LoaderOptions& options);

}  // namespace lockstep::data
