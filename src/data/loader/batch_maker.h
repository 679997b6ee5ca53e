// Makes the numbered batches of one rank's epoch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/data/dataset.h"
#include "lockstep/data/sampler.h"
#include "lockstep/data/transform.h"

namespace lockstep::data {

class BatchMaker {
 public:
  // Batches of the samples that `sampler` still has. `dataset` and `transforms` must outlive it.
  // Errors call it `whose`, such as "rank 1 of 2".
  BatchMaker(const Dataset& dataset, const std::vector<Transform>& transforms,
             DistributedSampler sampler, std::string whose, int64_t batch_size, int64_t count);

  int64_t count() const { return count_; }

  // Batch `number` in [0, count()). `spare`: an earlier one whose memory may serve again. Throws
  // DataError as Loader says. Several threads may call it at once.
  Batch make(int64_t number, Batch spare) const;

 private:
  Batch read(int64_t number, Batch spare, const std::vector<int64_t>& indices) const;
  [[noreturn]] void fail_reading(int64_t number, const std::vector<int64_t>& indices,
                                 const std::string& reason) const;
  std::string address(int64_t number) const;

  const Dataset& dataset_;
  const std::vector<Transform>& transforms_;
  DistributedSampler sampler_;
  std::string whose_;
  int64_t batch_size_;
  int64_t count_;
};

}  // namespace lockstep::data
