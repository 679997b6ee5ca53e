// Which samples each rank sees, in which order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/core/shard.h"

namespace lockstep::data {

// How an epoch is ordered and divided among ranks.
struct SamplerOptions {
  // The order of an epoch is a function of (seed, epoch, length) alone. The same on all ranks, and
  // so the length: with others samples come twice, and others not at all. Ddp and Fsdp compare what
  // indices(), a TorchSampler or a Loader begins after they were made, in their next pass (on a
  // GPU Ddp in its first three passes only).
  int64_t seed = 0;
  bool shuffle = true;
  // What to do when the number of samples is not a multiple of the number of ranks. With neither of
  // the two, the first samples of the order come again, so that all ranks have the same number.
  bool drop_last = false;  // leave out the last ones, so that all ranks have the same number
  bool exact = false;      // every sample once: ranks may differ by one. For evaluation
};

// A training's position in the data. The same on all ranks, and independent of their number.
struct SamplerState {
  int64_t epoch = 0;
  // Samples that all ranks together have taken from the beginning of the epoch's order; repeated
  // ones are not counted.
  int64_t position = 0;
  // Which order the position belongs to: in another one, other samples come before it.
  int64_t seed = 0;
  int64_t length = 0;  // samples in the data set
  bool shuffle = true;

  bool operator==(const SamplerState&) const = default;
};

// PyTorch's DistributedSampler: rank r of W takes samples r, r + W, r + 2W, ... of the epoch's
// order, which is torch.randperm(length) of a generator seeded with seed + epoch. Yields the same
// indices as Python's for every length, world, rank, seed, epoch, shuffle and drop_last (with the
// same libtorch).
//
// Resuming at position p is an epoch of the remaining order: rank r of W takes samples p + r, p + r
// + W, ..., also where W was another before; only then is the rest that W does not divide repeated,
// dropped or uneven. So with unchanged W the indices are those of the uninterrupted epoch, and with
// another W no sample comes twice and none is lost (except for the remainder at the end).
class DistributedSampler {
 public:
  // For rank part.index of part.count. Throws ConfigError for an impossible part, a negative
  // length, or drop_last with exact.
  DistributedSampler(int64_t length, Shard part, SamplerOptions options = {});

  // Starts epoch `epoch` >= 0 at its beginning. Costs a shuffle of all samples when the epoch
  // changes, none otherwise.
  void set_epoch(int64_t epoch);

  // How many samples this rank still has to take in this epoch.
  int64_t size() const { return size_; }
  // The i-th of them, 0 <= i < size().
  int64_t operator[](int64_t i) const {
    const int64_t place = position_ + part_.index + i * part_.count;
    return order_ ? order_[place < length_ ? place : place % length_] : place % length_;
  }
  // All of them.
  std::vector<int64_t> indices() const;

  // Every rank takes `count` more of its samples, or those that it still has.
  void advance(int64_t count);

  // Where it stands.
  SamplerState state() const {
    return {epoch_, position_, options_.seed, length_, options_.shuffle};
  }
  // Resumes from there, on any number of ranks, and with any drop_last and exact. Throws
  // ConfigError, and changes nothing, for a state of another seed, number of samples or shuffle.
  // At the beginning of an epoch the number of samples may be another one, of data that have grown:
  // rank 0 warns of it.
  void restore(const SamplerState& state);
  // Throws what restore() would throw for this state.
  void check(const SamplerState& state) const;

  // The seed of the options.
  int64_t seed() const { return options_.seed; }

  // This sampler as another of the part.count ranks has it: it shares the shuffled order.
  DistributedSampler of_part(int64_t index) const;

 private:
  void set_position(int64_t position);

  int64_t length_;
  Shard part_;
  SamplerOptions options_;
  int64_t epoch_ = -1;
  int64_t position_ = 0;
  int64_t size_ = 0;
  at::Tensor permutation_;  // int64; empty unless shuffled. Copies of a sampler share it: it is
                            // never changed
  const int64_t* order_ = nullptr;  // its elements
};

}  // namespace lockstep::data
