// The loss of a language model without all its logits.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "lockstep/core/compiler.h"

namespace lockstep::models {

// Options of cross_entropy().
struct CrossEntropyOptions {
  int64_t ignored = -100;  // targets of this value do not count
  // Tokens whose logits exist at a time; 0: as many as make about 16 MiB of logits.
  int64_t chunk = 0;
  bool mean = true;  // over the targets that count (NaN, with gradients of 0, when there is none);
                     // false: the sum
};

// -log softmax(hidden weight^T)[target], over all tokens: hidden ... x width, weight vocabulary x
// width, targets ... (int64). The value and the gradients are those of linear() and
// torch::nn::functional::cross_entropy to rounding, but no more than `chunk` x vocabulary logits
// are in memory at once, and none until backward: the gradients are computed along with the value
// (Hsu et al., "Liger Kernel", 2024). Products take the dtype of an Autocast; the softmax, sums
// over chunks and what comes with backward, such as a loss scale, are in float32 or wider. Throws
// ConfigError for sizes that do not fit, and a target outside the vocabulary; its backward does
// with create_graph, since it has no second derivative.
at::Tensor cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                         const at::Tensor& targets, const CrossEntropyOptions& options = {});

}  // namespace lockstep::models
