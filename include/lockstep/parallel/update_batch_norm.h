// Running statistics of BatchNorm for weights that have changed without training: averaged ones.
#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <functional>

#include "lockstep/comm/group.h"

namespace lockstep::parallel {

// As torch.optim.swa_utils.update_bn of PyTorch:
//
//   const auto applied = average.apply();             // a WeightAverage of the parameters
//   update_batch_norm(*net, world, [&] {
//     for (const auto& batch : loader) net->forward(batch.data);
//   });
//   evaluate(net);
//
// Running means and variances of all BatchNorm and SyncBatchNorm layers below `module` become the
// plain means of those of the batches that `run` takes through it, in train() and without
// gradients. Momenta and modes are what they were afterwards; so are statistics when it throws, and
// those of a layer that no batch has passed.
//
// Ranks: all of `group` call it, each with batches of its own, of any number (SyncBatchNorm layers
// and an Fsdp need equal numbers); the result is the same on all, and but for roundings that of one
// process which takes all batches. Returns how many layers have running statistics; without any,
// `run` is not called. Throws ConfigError for a group with lanes, since the roundings depend on the
// number of ranks: with World::solo() and all batches on each rank they do not.
size_t update_batch_norm(torch::nn::Module& module, const Group& group,
                         const std::function<void()>& run);

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::update_batch_norm;
}  // namespace lockstep
