// Means over all samples (or tokens) of all ranks, exact when ranks and micro-batches have
// different numbers of them. The mean of the ranks' means, which is what Ddp alone computes,
// differs from it in that case. A count may be a sum of weights: those of the samples' classes, or
// what else a loss is divided by. With lanes it has to be a whole number.
//
//   GlobalMean mean(world);
//   ddp.zero_grad();
//   for (each micro-batch) {                                  // all but the last under ddp.hold()
//     cross_entropy(net(x), y, reduction = sum).backward();
//     mean.add(tokens in y);
//   }
//   mean.scale_gradients_(net.parameters());
//   optimizer.step();
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::parallel {

// The sum of the ranks' counts. Every rank calls it; one may have 0. Throws ConfigError on all
// ranks when the sum is below 1 or beyond int64_t, on the rank alone for a count below 0.
int64_t global_count(const Group& group, int64_t count);

// What to multiply a summed loss by when the counts of the whole step are known before its first
// backward(): size() / global_count, or with lanes their number / global_count. Ddp's average of
// the gradients is then the mean over all samples, and nothing needs to be scaled afterwards. A
// loss of several terms that count different things (a detector's) has a scale for each. Every rank
// calls it: one all_reduce. Throws ConfigError on all ranks when the sum is 0, on the rank alone
// for a count below 0.
double global_mean_scale(const Group& group, double count);

// The mean of a summed loss or metric over all ranks' samples, the same bits on all of them. `sum`
// has one element (ConfigError), of any real dtype; the sum over ranks is taken in float64. Every
// rank calls it: one all_reduce. Throws as global_mean_scale(). With lanes its last bits depend on
// the number of ranks: use LaneMean there.
double global_mean(const Group& group, const at::Tensor& sum, double count);

// Turns gradients of summed losses, which Ddp has averaged over ranks, into those of the mean.
class GlobalMean {
 public:
  // The ranks whose samples count.
  explicit GlobalMean(const Group& group) : group_(group) {}

  // Samples of a micro-batch of this rank. Throws ConfigError when below 0 or not finite.
  void add(double count);

  // Multiplies the gradients by size() / global count of what was added since the last call (where
  // Ddps of the group have lanes: by their number in the place of size()), and
  // returns that count. Every rank calls it once a step, after the backward() outside hold().
  // Throws as global_mean_scale() does; the gradients and the count are then as they were.
  double scale_gradients_(const std::vector<at::Tensor>& parameters);

 private:
  Group group_;
  double count_ = 0;
};

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::global_count;
using parallel::global_mean;
using parallel::global_mean_scale;
using parallel::GlobalMean;
}  // namespace lockstep
