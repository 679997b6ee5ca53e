// A step's batches, one for each lane: Loader::steps().
#pragma once

#include <cstdint>
#include <iterator>
#include <memory>

#include "lockstep/core/shard.h"
#include "lockstep/data/dataset.h"

namespace lockstep::data {

class StepCursor;

// Names what a step draws at random, the same for every number of ranks.
struct StepKey {
  uint64_t seed = 0;
  int64_t step = 0;
};

// One step: a handle, valid until the loop moves on to the next one (ConfigError afterwards).
class Step {
 public:
  // All that the step has, on all ranks together, and those of them that this rank runs.
  int64_t lane_count() const;
  Range lanes() const;

  // The batch of one of this rank's lanes, which is made when it or a later lane's is first asked
  // for, and kept until the step is over. Throws what Loader says of batches.
  const Batch& batch(int64_t lane) const;

  // A key of (seed, epoch, samples taken before the step) and of how often it was called in this
  // step, so that a second loop over the step's lanes draws other numbers than the first.
  StepKey next_key() const;

 private:
  friend class Steps;
  Step(StepCursor* cursor, int64_t number) : cursor_(cursor), number_(number) {}
  StepCursor& cursor() const;

  StepCursor* cursor_;
  int64_t number_;
};

// for (auto step : loader.steps(epoch)) ...: to be gone through once.
class Steps {
 public:
  class Iterator {
   public:
    using iterator_concept = std::input_iterator_tag;
    using value_type = Step;
    using difference_type = std::ptrdiff_t;

    Step operator*() const;  // throws what ++ threw
    Iterator& operator++();
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const;

   private:
    friend class Steps;
    explicit Iterator(StepCursor* cursor) : cursor_(cursor) {}
    StepCursor* cursor_;
  };

  // Made by Loader::steps().
  explicit Steps(std::unique_ptr<StepCursor> cursor);
  Steps(Steps&&) noexcept;
  ~Steps();

  // Steps still to come.
  int64_t size() const;

  Iterator begin();
  std::default_sentinel_t end() const { return {}; }

 private:
  std::unique_ptr<StepCursor> cursor_;
};

}  // namespace lockstep::data
