// What ranks compute together besides gradients: sums and means of metrics, samples of an
// evaluation, whether to stop, the loss that a line search sees. Every rank of the group calls each
// of them, and gets the same bits. In a group of one they cost nothing.
//
// A mean over all ranks' samples is global_mean(group, sum, count)
// (lockstep/parallel/global_mean.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "lockstep/comm/group.h"

namespace lockstep::parallel {

// Elementwise, as a new tensor without history: of the ranks' tensors of one shape and any dtype
// that Group takes.
at::Tensor sum_over_ranks(const at::Tensor& value, const Group& group);
// In float64: counts below 2^53 are exact.
double sum_over_ranks(double value, const Group& group);

// Options of gather_for_metrics().
struct GatherOptions {
  // How many samples there are on all ranks together. A sampler that gives all ranks equally many
  // repeats some at the end, which come last here and are left out. Not needed for batches of a
  // loader with `exact`, or with `drop_last`.
  std::optional<int64_t> samples = std::nullopt;
};

// The rows of all ranks (of dimension 0; predictions and labels, one a sample) in the order of the
// samples: row i of rank r is row i * size() + r, as DistributedSampler deals them out. Ranks may
// have different numbers of rows, as in the last batch of an exact loader; none, too, with the
// other sizes the same. Pass an epoch's rows at once, or a batch's. Rows of one dtype and device,
// the same on all ranks, without history. Throws ConfigError on all ranks when sizes or dtypes
// differ, when the numbers of rows are not those of a sampler, or when there are fewer than
// `samples`.
at::Tensor gather_for_metrics(const at::Tensor& rows, const Group& group,
                              const GatherOptions& options = {});

// Whether it is so on any rank, on every rank: what a test that may come out differently on each
// (early stopping, a time limit, a signal) has to pass through before ranks leave a loop.
bool any_rank(bool here, const Group& group);
bool every_rank(bool here, const Group& group);

// The mean of the ranks' losses (of one element), without history: the loss whose gradients Ddp
// gives. For optimizers that look at it, such as LBFGS with its line search:
//
//   lbfgs.step([&] {
//     lbfgs.zero_grad();
//     const auto loss = ...;                        // of this rank's batch
//     loss.backward();                              // Ddp averages the gradients
//     return global_loss(loss, world);              // and this the value: all ranks make the same
//     step
//   });
//
// And for schedulers that take a metric, as torch's ReduceLROnPlateauScheduler (ReduceLrOnPlateau
// averages by itself). The mean of whole numbers is float64. Every rank calls it: one all_reduce.
// Throws ConfigError for a loss of several elements, and with lanes, for which there is LaneMean.
at::Tensor global_loss(const at::Tensor& loss, const Group& group);

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::any_rank;
using parallel::every_rank;
using parallel::gather_for_metrics;
using parallel::GatherOptions;
using parallel::global_loss;
using parallel::sum_over_ranks;
}  // namespace lockstep
