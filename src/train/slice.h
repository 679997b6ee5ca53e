// Parts of a data set.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/core/shard.h"
#include "lockstep/data/dataset.h"
#include "lockstep/train/model_config.h"

namespace lockstep::train {

// The samples of `range`, counted from 0.
class Slice : public data::Dataset {
 public:
  Slice(std::shared_ptr<const data::Dataset> whole, Range range)
      : whole_(std::move(whole)), range_(range) {}

  int64_t size() const override { return range_.size(); }
  data::Batch get_batch(at::IntArrayRef indices) const override {
    return whole_->get_batch(moved(indices));
  }
  data::Batch refill(data::Batch spare, at::IntArrayRef indices) const override {
    return whole_->refill(std::move(spare), moved(indices));
  }

 private:
  std::vector<int64_t> moved(at::IntArrayRef indices) const {
    std::vector<int64_t> all(indices.begin(), indices.end());
    for (auto& index : all) index += range_.begin;
    return all;
  }

  std::shared_ptr<const data::Dataset> whole_;
  Range range_;
};

// Samples are ordered by class in an ImageFolder, so that its last share would be of the last
// classes only. Here classes take turns: a first or last share has about that share of each class.
// Other data sets are returned as they are.
std::shared_ptr<const data::Dataset> with_classes_in_turns(
    std::shared_ptr<const data::Dataset> whole);

// Throws ConfigError when the samples are ordered by class, as some tables are, so that the last
// `last_ones` of them are of the last classes only. Reads until it sees that they are not.
void refuse_ordered_classes(const data::Dataset& whole, int64_t last_ones, double fraction);

// How many of the last samples are for evaluation, and not to train on or to measure.
inline int64_t held_out(const DataConfig& data, int64_t samples) {
  return std::llround(data.validation_fraction * static_cast<double>(samples));
}

}  // namespace lockstep::train
