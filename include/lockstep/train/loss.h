// Losses as values: functions of a model's output and the targets that give the mean over a batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "lockstep/core/compiler.h"

namespace lockstep::train {

// The mean loss over a batch, of one element. Any function will do.
using Loss = std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)>;

// Options of cross_entropy().
struct CrossEntropyOptions {
  double label_smoothing = 0;
  int64_t ignore_index = -100;  // targets that do not count
};

// torch.nn.functional's, with mean reduction. Outputs n x classes (or n x classes x ...), targets
// whole numbers of any dtype, or shares of the classes. Of one class it would be 0 for each output:
// throws ConfigError.
Loss cross_entropy(const CrossEntropyOptions& options = {});
// Outputs and targets of the same shape; a target of n for an output of n x 1 is taken as n x 1,
// since libtorch would otherwise broadcast both to n x n. Targets may be of any dtype.
Loss mse();
Loss l1();
Loss huber(double delta = 1);
Loss bce_with_logits();
// Outputs are logarithms of probabilities, targets whole numbers of any dtype.
Loss nll();

}  // namespace lockstep::train
