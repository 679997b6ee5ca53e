// Random numbers that depend on what is computed, not on which rank computes it.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::parallel {

// Seeds libtorch's generators of every device, and C's rand(). The same seed on all ranks gives all
// the same initial weights.
void seed_everything(uint64_t seed);

// As above, for ranks that train one model, called on each before the module is built: all draw the
// same numbers, so that they build the same module, until a Ddp of more than one rank is
// constructed. From then on each rank draws its own (dropout, noise, augmentation): rank 0
// continues with the numbers of a process on its own, rank r with those of
// seed_everything(stream_seed({.seed = seed, .lane = r})). Modules built later become rank 0's when
// their Ddp is constructed. Without a Ddp all keep drawing the same. Does not communicate.
void seed_everything(uint64_t seed, const Group& group);

// Names one lane's randomness in one step. A lane is a logical shard of the batch: rank r of W has
// lanes Shard{r, W}.of(lanes), so the same lane may run on another rank when the number of ranks
// changes.
struct Stream {
  uint64_t seed = 0;
  int64_t step = 0;
  int64_t lane = 0;
};

// mix(mix(mix(seed) ^ step) ^ lane), where mix is SplitMix64's step (Steele et al., "Fast
// Splittable Pseudorandom Number Generators", OOPSLA 2014): a bijection of 64 bits whose outputs
// look independent even for neighbouring inputs. Lanes of one step never collide.
uint64_t stream_seed(const Stream& stream);

// While it lives, libtorch's default generators of the CPU and of `device` draw the stream's
// numbers: dropout, augmentation, sampling. Its end, by exception too, puts back the generators as
// they were, so that what is drawn outside does not depend on how many lanes this rank runs. Guards
// nest. Threads share these generators: one thread at a time may have one.
class [[nodiscard]] RandomStream {
 public:
  // Begins it.
  explicit RandomStream(const Stream& stream, at::Device device = at::kCPU);
  ~RandomStream();
  RandomStream(const RandomStream&) = delete;
  RandomStream& operator=(const RandomStream&) = delete;

 private:
  struct Saved {
    at::Generator generator;
    at::Tensor state;
  };
  std::vector<Saved> saved_;
};

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::RandomStream;
using parallel::seed_everything;
using parallel::Stream;
using parallel::stream_seed;
}  // namespace lockstep
