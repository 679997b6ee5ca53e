// Lanes: a run whose result does not depend on how many ranks have computed it. The batch of a step
// is cut into a fixed number of lanes. Each rank runs its part of them one after another, and
// everything that is summed is summed over lanes, in the tree of docs/architecture.md over lane
// numbers: with 8 lanes, 1, 2, 3, ... 8 ranks give the same bits. docs/reproducibility.md says what
// else they depend on.
//
//   Loader loader(train, world, {.batch_size = 8, .lanes = 8});         // samples of a lane
//   Ddp ddp(*net, world.group(), {.lanes = 8});
//   for (auto step : loader.steps(epoch)) {
//     ddp.zero_grad();
//     for (auto [x, y] : ddp.lanes(step)) cross_entropy(net->forward(x), y).backward();
//     adam.step();
//   }
//
// The inner loop is Ddp's, and the only way to a batch, so that nothing can be left out: it tells
// Ddp which lane's gradient comes next, gives the lane random numbers of its own (dropout in lane l
// of step k is the same on any number of ranks) and the buffers that the step began with. A
// backward() outside of it, a lane without one, or one with two is refused by ConfigError on all
// ranks. The alternatives were a call within the plain loop, which can be forgotten, and a lane
// that belongs to the thread, which backward() on a GPU would not see. So one thread of a process
// at a time may be in a lane, and a loop that begins one while another thread is gets ConfigError.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/shard.h"
#include "lockstep/data/steps.h"
#include "lockstep/parallel/random.h"

namespace lockstep::parallel {

class Ddp;
class Fsdp;
struct LanePlan;
using data::StepKey;

// One lane of a step, for programs that make their batches themselves.
struct Lane {
  int64_t index = 0;
  int64_t count = 1;  // of the step, on all ranks together
};

// What adds up gradients over lanes. Private to the library.
class LaneListener {
 public:
  virtual ~LaneListener() = default;
  // The loop enters one of this rank's lanes, and leaves it. What is wrong with the lane is refused
  // in the next pass.
  virtual void enter_lane(int64_t lane) = 0;
  virtual void leave_lane() = 0;
  // After the last. Throws ConfigError on all ranks when a lane of this rank has had no backward().
  virtual void end_lanes() = 0;
};

// The lane that a loop is in. Private to LaneRange.
class LaneTurn {
 public:
  // Begins the pass of `listeners` at this rank's first lane.
  LaneTurn(std::vector<std::shared_ptr<LaneListener>> listeners,
           std::shared_ptr<const LanePlan> plan, StepKey key, at::Device device);
  ~LaneTurn();
  LaneTurn(const LaneTurn&) = delete;
  LaneTurn& operator=(const LaneTurn&) = delete;

  // The number of the lane, counted over all ranks.
  int64_t lane() const { return lane_; }
  // Whether this rank has gone through all of its lanes.
  bool done() const;
  // Ends the lane and begins the next. Throws what is wrong with the lane that ends.
  void next();

 private:
  void enter();
  void leave();

  std::vector<std::shared_ptr<LaneListener>> listeners_;
  std::shared_ptr<const LanePlan> plan_;
  StepKey key_;
  at::Device device_;
  int64_t lane_;
  std::optional<RandomStream> stream_;
};

// This rank's lanes of one step, to be gone through once. `Item` gives what the loop gets for a
// lane.
template <class Item>
class LaneRange {
 public:
  class Iterator {
   public:
    using iterator_concept = std::input_iterator_tag;
    using value_type = std::remove_cvref_t<decltype(std::declval<const Item&>()(int64_t{}))>;
    using difference_type = std::ptrdiff_t;

    decltype(auto) operator*() const { return (*item_)(turn_->lane()); }
    Iterator& operator++() {
      turn_->next();
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return turn_->done(); }

   private:
    friend class LaneRange;
    Iterator(std::unique_ptr<LaneTurn> turn, const Item* item)
        : turn_(std::move(turn)), item_(item) {}
    std::unique_ptr<LaneTurn> turn_;
    const Item* item_;
  };

  // Made by Ddp::lanes() and Fsdp::lanes().
  LaneRange(std::vector<std::shared_ptr<LaneListener>> listeners,
            std::shared_ptr<const LanePlan> plan, StepKey key, at::Device device, Item item)
      : listeners_(std::move(listeners)),
        plan_(std::move(plan)),
        key_(key),
        device_(device),
        item_(std::move(item)) {}

  Iterator begin() {
    if (!plan_)
      throw ConfigError("[lanes] a step's lanes can be gone through once: call lanes() again");
    return Iterator(
        std::make_unique<LaneTurn>(std::move(listeners_), std::move(plan_), key_, device_), &item_);
  }
  std::default_sentinel_t end() const { return {}; }

 private:
  std::vector<std::shared_ptr<LaneListener>> listeners_;
  std::shared_ptr<const LanePlan> plan_;
  StepKey key_;
  at::Device device_;
  Item item_;
};

// What a loop over the lanes of a loader's step gets: the lane's batch.
struct BatchOfLane {
  data::Step step;
  // The batch of lane `lane`, which has to be one of this rank's.
  const data::Batch& operator()(int64_t lane) const { return step.batch(lane); }
};

// What a loop gets whose program makes its batches itself: the lane's number.
struct NumberOfLane {
  int64_t count;
  // The lane of this number.
  Lane operator()(int64_t lane) const { return {lane, count}; }
};

// The mean of what lanes compute beside gradients (losses, metrics), the same bits on all ranks and
// for every number of them:
//
//   LaneMean loss(ddp);
//   for (auto [x, y] : ddp.lanes(step)) { ...; loss.add(lane_loss); }
//   log(loss.mean());
class LaneMean {
 public:
  explicit LaneMean(const Ddp& ddp);    // which has lanes, and may be gone before this
  explicit LaneMean(const Fsdp& fsdp);  // the same

  // In a lane, any number of times: a sum over `count` samples (or tokens), or the mean of a lane.
  // One element, any real dtype; added up in float64. Throws ConfigError outside of a lane, and for
  // a count below 0.
  void add(const at::Tensor& sum, int64_t count = 1);
  void add(double sum, int64_t count = 1);

  // Every rank calls it, outside of a lane: all sums divided by all counts since the last call.
  // Throws ConfigError on all ranks when the counts add up to nothing.
  double mean();

 private:
  std::shared_ptr<const LanePlan> plan_;
  std::vector<std::pair<double, double>> sums_;  // by own lane, with counts
};

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::Lane;
using parallel::LaneMean;
using parallel::StepKey;
}  // namespace lockstep
