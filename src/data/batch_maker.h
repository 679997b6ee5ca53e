// Makes the numbered batches of one rank's epoch.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/core/shard.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/sampler.h"

namespace lockstep::data {

class BatchMaker {
 public:
  using Transforms = std::vector<std::function<Batch(Batch)>>;

  // Batches of the samples that `sampler` still has. `dataset` and `transforms` must outlive it.
  BatchMaker(const Dataset& dataset, const Transforms& transforms, DistributedSampler sampler,
             Shard part, int64_t batch_size, int64_t count);

  int64_t count() const { return count_; }

  // Batch `number` in [0, count()). `spare`: an earlier one whose memory may serve again. Throws
  // DataError as Loader says.
  Batch make(int64_t number, Batch spare);

 private:
  [[noreturn]] void fail_reading(int64_t number, const std::string& reason) const;
  std::string address(int64_t number) const;

  const Dataset& dataset_;
  const Transforms& transforms_;
  DistributedSampler sampler_;
  Shard part_;
  int64_t batch_size_;
  int64_t count_;
  std::vector<int64_t> indices_;  // of the batch being made
};

}  // namespace lockstep::data
