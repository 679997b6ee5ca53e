// A plain convolutional network for small images.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <vector>

#include "lockstep/models/holder.h"

namespace lockstep::models {

// Options of a ConvNet.
struct ConvNetOptions {
  int64_t in_channels = 1;  // 1: grey, 3: colours
  int64_t classes = 10;
  // The channels of each stage, which halves height and width.
  std::vector<int64_t> channels = {32, 64};
  double dropout = 0.0;    // the probability, before the classifier
  bool batch_norm = true;  // without, the convolutions have a bias
};

// Per stage a 3 x 3 convolution without bias, BatchNorm, ReLU and 2 x 2 max-pooling; then the mean
// over height and width, and a linear classifier. Any height and width of at least 2 to the power
// of the stages. Names: features.0.weight (convolution), features.1.* (BatchNorm),
// features.4.weight and so on, classifier.weight, classifier.bias; initial values as PyTorch's
// layers have them.
class ConvNetImpl : public torch::nn::Cloneable<ConvNetImpl> {
 public:
  // Draws the initial values from the default generator. Throws ConfigError for a number below 1,
  // no stage or a dropout outside [0, 1).
  explicit ConvNetImpl(const ConvNetOptions& options = {});

  // Images n x in_channels x height x width; gives n x classes: no softmax. Throws ConfigError for
  // others.
  at::Tensor forward(const at::Tensor& images);

  // Creates the layers again.
  void reset() override;

  ConvNetOptions options;
  torch::nn::Sequential features{nullptr};
  torch::nn::Linear classifier{nullptr};
};

// What a program makes and keeps: ConvNet({.in_channels = 3}).
using ConvNet = Holder<ConvNetImpl, ConvNetOptions>;

}  // namespace lockstep::models
