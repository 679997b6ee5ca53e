// This thread's random numbers, in place of those of libtorch's default generators.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <vector>

#include "lockstep/data/draws.h"

namespace lockstep::data {

// Which numbers are drawn: turn 0 is the data set's, turn t + 1 that of transform t.
struct DrawPlace {
  int64_t seed = 0;
  int64_t epoch = 0;
  int64_t turn = 0;
};

// libtorch's default generators are one for the whole process. What a thread that makes batches
// drew from them would depend on when it came to it, and would change what the training beside it
// draws for dropout. While a Draws lives, operators of its thread that would use a default
// generator use one of its own. Guards nest.
class [[nodiscard]] Draws {
 public:
  explicit Draws(const DrawPlace& place);
  ~Draws();
  Draws(const Draws&) = delete;
  Draws& operator=(const Draws&) = delete;

  // What is drawn from now on belongs to this sample, or to the batch that begins with it. Costs
  // nothing until something is drawn.
  void for_sample(int64_t index);
  void for_batch(int64_t first);

  // The generator for tensors of `device`.
  at::Generator generator(at::Device device);

  // This thread's; null outside any.
  static Draws* current();

 private:
  struct Own {
    at::Generator generator;
    bool is_seeded;
  };
  void reseed(uint64_t seed);

  uint64_t base_;
  uint64_t seed_;
  std::vector<Own> own_;  // one for each device that was drawn on
  Draws* outer_;
  c10::impl::IncludeDispatchKeyGuard key_;
};

}  // namespace lockstep::data
