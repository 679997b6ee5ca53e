// Synchronises batch normalisation layers of libtorch without replacing them.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include "lockstep/comm/group.h"
#include "parallel/ddp/join/gate.h"

namespace lockstep::parallel {

// From now on aten::batch_norm() in training is synchronous over `group` when it is called with one
// of these tensors (a layer's weight, running mean) while `layer` lives and is in training. C++
// binds a layer's forward() at compile time, but that calls batch_norm() through libtorch's
// dispatcher, where a kernel of ours looks for the tensors and passes on every other call. The
// process gets that kernel with the first layer; the dispatcher has one for the process, too.
void override_batch_norm(const std::shared_ptr<torch::nn::Module>& layer,
                         const std::vector<at::Tensor>& tensors, const Group& group);

// Such a layer calls the gate before it communicates. False for another layer.
bool gate_batch_norm(const torch::nn::Module& layer, const std::shared_ptr<JoinGate>& gate);

// The ranks whose batches the layer normalises together: 1 unless override_batch_norm() was called.
int batch_norm_ranks(const torch::nn::Module& layer);

// SyncBatchNorm's forward in training, once `factor` is known. Undefined tensors are options that
// are off.
at::Tensor synchronous_batch_norm(const at::Tensor& input, const at::Tensor& weight,
                                  const at::Tensor& bias, const at::Tensor& running_mean,
                                  const at::Tensor& running_var, double factor, double eps,
                                  const Group& group);

}  // namespace lockstep::parallel
