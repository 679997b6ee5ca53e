// ResNet-18 (He et al., "Deep residual learning for image recognition", CVPR 2016).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>

#include "lockstep/models/holder.h"

namespace lockstep::models {

// Options of a ResNet18.
struct ResNet18Options {
  int64_t classes = 1000;
  int64_t in_channels = 3;
  // For images of about 32 x 32: the first convolution is 3 x 3 with stride 1, and no max-pooling
  // follows it, so that the first stage sees the whole image.
  bool small_images = false;
  // Begins with residual branches that give zero (Goyal et al., arXiv:1706.02677).
  bool zero_init_residual = false;
};

// The same network as torchvision.models.resnet18: its names (conv1, bn1, layer1.0.conv1, ...,
// layer2.0.downsample.0, ..., fc), 11,689,512 parameters for 1000 classes, its initial values and,
// from the same seed, their bits. So load_module() reads torchvision's weights.
class ResNet18Impl : public torch::nn::Cloneable<ResNet18Impl> {
 public:
  // Draws the initial values from the default generator. Throws ConfigError for a number below 1.
  explicit ResNet18Impl(const ResNet18Options& options = {});

  // Images n x in_channels x height x width, of 224 x 224 as a rule; gives n x classes: no softmax.
  // Throws ConfigError for others.
  at::Tensor forward(const at::Tensor& images);

  // Creates the layers again.
  void reset() override;

  ResNet18Options options;
  torch::nn::Conv2d conv1{nullptr};
  torch::nn::BatchNorm2d bn1{nullptr};
  torch::nn::Sequential layer1{nullptr}, layer2{nullptr}, layer3{nullptr}, layer4{nullptr};
  torch::nn::Linear fc{nullptr};
};

// What a program makes and keeps: ResNet18({.classes = 10}).
using ResNet18 = Holder<ResNet18Impl, ResNet18Options>;

}  // namespace lockstep::models
