// The multi-layer perceptron.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <iosfwd>
#include <vector>

#include "lockstep/models/activation.h"
#include "lockstep/models/holder.h"

namespace lockstep::models {

// Options of an Mlp.
struct MlpOptions {
  // Features of a sample, then the outputs of each layer: {784, 256, 10} has one hidden layer.
  std::vector<int64_t> sizes;
  // After each layer but the last.
  Activation activation = Activation::Relu;
  double dropout = 0.0;  // the probability, after each activation
  bool bias = true;
};

// Linear layers with activations between them. Names, initial values and, from the same seed, bits
// are those of torch.nn.Sequential(Linear, ReLU, Linear, ...), with a Dropout after each activation
// when `dropout` is positive: 0.weight, 0.bias, 2.weight (with dropout 3.weight), ...
class MlpImpl : public torch::nn::Cloneable<MlpImpl> {
 public:
  // Draws the initial values from the default generator. Throws ConfigError for fewer than two
  // sizes, a size below 1 or a dropout outside [0, 1).
  explicit MlpImpl(const MlpOptions& options);

  // Samples of any shape with sizes[0] elements each, n x ...; gives n x sizes.back(): no softmax.
  // Throws ConfigError for others.
  at::Tensor forward(const at::Tensor& input);

  // Creates the layers again.
  void reset() override;
  // "lockstep::models::Mlp(784 -> 256 -> 10, relu, dropout=0)"
  void pretty_print(std::ostream& stream) const override;

  MlpOptions options;

 private:
  std::vector<torch::nn::Linear> layers_;
};

// What a program makes and keeps: Mlp({.sizes = {784, 256, 10}}).
using Mlp = Holder<MlpImpl, MlpOptions>;

}  // namespace lockstep::models
