// The data of an epoch's steps: micro-batches, or lanes.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/data/loader.h"

namespace lockstep::train {

// The data of one step on this rank.
struct MicroBatches {
  std::vector<data::Batch> batches;  // without lanes
  // With lanes: the loader's step, and what the lanes have before it, by micro-batch and own lane.
  std::optional<data::Step> lanes;
  std::vector<std::vector<data::Batch>> before;

  // What a lane has, whose last micro-batch this is.
  std::vector<data::Batch> of_lane(int64_t own_lane, const data::Batch& last) const;
};

// What is left of an epoch, step by step.
class Feed {
 public:
  // Of a loader with lanes or without; `accumulation` batches a step, of each lane.
  Feed(data::Loader& loader, int64_t lanes, int64_t epoch, int64_t accumulation);

  // The next step's data, until the next call. Null at the end; then the loader stands at the front
  // of the next epoch.
  MicroBatches* next();
  // Whether next() has given the last one.
  bool is_done() const { return (epoch_ ? epoch_->batches() : steps_->size()) == 0; }

 private:
  void take_batches();
  void take_lanes();

  int64_t accumulation_;
  std::optional<data::Loader::Epoch> epoch_;
  std::optional<data::Loader::Epoch::Iterator> batch_;
  std::optional<data::Steps> steps_;
  std::optional<data::Steps::Iterator> step_;
  MicroBatches now_;
};

}  // namespace lockstep::train
