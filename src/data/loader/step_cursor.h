// Goes through an epoch's steps.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "data/loader/ahead.h"
#include "data/loader/batch_maker.h"
#include "data/loader/loader_shared.h"
#include "lockstep/data/steps.h"

namespace lockstep::data {

class StepCursor {
 public:
  // `count` steps of what the loader's sampler still has.
  StepCursor(std::shared_ptr<Loader::Shared> loader, int64_t count);

  bool has_begun() const { return taken_ > 0; }
  bool done() const { return taken_ > count_; }
  int64_t count() const { return count_; }
  // Steps that the loop had, and one more when it has seen the end.
  int64_t taken() const { return taken_; }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

  void take_next();

  int64_t lane_count() const;
  Range lanes() const;
  const Batch& batch(int64_t lane);
  StepKey next_key();

 private:
  int64_t own_lanes() const { return static_cast<int64_t>(makers_.size()); }
  Batch make(int64_t number, std::optional<Batch> spare) const;
  Batch next();
  void fetch();

  std::shared_ptr<Loader::Shared> shared_;
  DistributedSampler sampler_;      // stands after the step in the loop's hands
  std::vector<BatchMaker> makers_;  // by own lane
  int64_t count_;
  int64_t taken_ = 0;
  int64_t keys_ = 0;     // of the step, given out
  SamplerState before_;  // the step
  std::vector<Batch> made_,
      current_;  // of the step's first lanes; the same where the loop wants it
  std::vector<Batch> spares_;
  std::exception_ptr error_;
  std::shared_ptr<Ahead<Batch>> ahead_;  // last: its threads use the makers
};

}  // namespace lockstep::data
