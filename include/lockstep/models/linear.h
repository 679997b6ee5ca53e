// A linear model: linear regression, or with cross_entropy() softmax regression.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>

#include <cstdint>
#include <iosfwd>

#include "lockstep/models/holder.h"

namespace lockstep::models {

// Options of a Linear model.
struct LinearOptions {
  int64_t inputs;       // features of a sample
  int64_t outputs = 1;  // values or classes
  bool bias = true;
};

// y = x W^T + b, with the names, the initial values and, from the same seed, the bits of
// torch.nn.Linear: weight [outputs, inputs], bias [outputs].
class LinearImpl : public torch::nn::Cloneable<LinearImpl> {
 public:
  // Draws the initial values from the default generator. Throws ConfigError for a size below 1.
  explicit LinearImpl(const LinearOptions& options);

  // Samples of the parameters' dtype and any shape with `inputs` elements each, n x ...; gives
  // n x outputs. Throws ConfigError for another number of elements.
  at::Tensor forward(const at::Tensor& input);

  // Creates the parameters again.
  void reset() override;
  // "lockstep::models::Linear(inputs=3, outputs=1, bias=true)"
  void pretty_print(std::ostream& stream) const override;

  LinearOptions options;
  at::Tensor weight;
  at::Tensor bias;  // undefined without
};

// What a program makes and keeps: Linear({.inputs = 3}).
using Linear = Holder<LinearImpl, LinearOptions>;

}  // namespace lockstep::models
