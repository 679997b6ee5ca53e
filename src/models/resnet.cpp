#include "lockstep/models/resnet.h"

#include <torch/torch.h>

#include "lockstep/parallel/call.h"
#include "models/checks.h"

namespace lockstep::models {

namespace nn = torch::nn;

namespace {

nn::Conv2d convolution(int64_t in, int64_t out, int64_t kernel, int64_t stride) {
  return nn::Conv2d(
      nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

struct BasicBlockImpl : nn::Cloneable<BasicBlockImpl> {
  BasicBlockImpl(int64_t in_channels, int64_t out_channels, int64_t first_stride)
      : in(in_channels), out(out_channels), stride(first_stride) {
    BasicBlockImpl::reset();
  }

  void reset() override {
    // torchvision makes a stage's downsample before its block, and draws are in that order.
    nn::Sequential projection{nullptr};
    if (stride != 1 || in != out) {
      projection = nn::Sequential(convolution(in, out, 1, stride), nn::BatchNorm2d(out));
    }
    conv1 = register_module("conv1", convolution(in, out, 3, stride));
    bn1 = register_module("bn1", nn::BatchNorm2d(out));
    conv2 = register_module("conv2", convolution(out, out, 3, 1));
    bn2 = register_module("bn2", nn::BatchNorm2d(out));
    downsample = projection;
    if (!downsample.is_empty()) register_module("downsample", downsample);
  }

  at::Tensor forward(const at::Tensor& x) {
    using parallel::call;
    at::Tensor branch = at::relu(call(bn1, call(conv1, x)));
    branch = call(bn2, call(conv2, branch));
    return branch.add_(downsample.is_empty() ? x : call(downsample, x)).relu_();
  }

  int64_t in, out, stride;
  nn::Conv2d conv1{nullptr}, conv2{nullptr};
  nn::BatchNorm2d bn1{nullptr}, bn2{nullptr};
  nn::Sequential downsample{nullptr};
};
TORCH_MODULE(BasicBlock);

}  // namespace

ResNet18Impl::ResNet18Impl(const ResNet18Options& options_) : options(options_) {
  check_positive("resnet18", "classes", options.classes);
  check_positive("resnet18", "in_channels", options.in_channels);
  ResNet18Impl::reset();
}

void ResNet18Impl::reset() {
  conv1 =
      register_module("conv1", options.small_images ? convolution(options.in_channels, 64, 3, 1)
                                                    : convolution(options.in_channels, 64, 7, 2));
  bn1 = register_module("bn1", nn::BatchNorm2d(64));
  const auto stage = [this](const char* name, int64_t in, int64_t out) {
    nn::Sequential blocks;
    blocks->push_back(BasicBlock(in, out, in == out ? 1 : 2));
    blocks->push_back(BasicBlock(out, out, 1));
    return register_module(name, blocks);
  };
  layer1 = stage("layer1", 64, 64);
  layer2 = stage("layer2", 64, 128);
  layer3 = stage("layer3", 128, 256);
  layer4 = stage("layer4", 256, 512);
  fc = register_module("fc", nn::Linear(512, options.classes));
  for (const auto& module : modules(/*include_self=*/false)) {
    if (auto* convolution = module->as<nn::Conv2dImpl>()) {
      nn::init::kaiming_normal_(convolution->weight, 0, torch::kFanOut, torch::kReLU);
    }
  }
  if (!options.zero_init_residual) return;
  const at::NoGradGuard no_grad;
  for (const auto& module : modules(/*include_self=*/false)) {
    if (auto* block = module->as<BasicBlockImpl>()) block->bn2->weight.zero_();
  }
}

at::Tensor ResNet18Impl::forward(const at::Tensor& images) {
  check_images("resnet18", images, options.in_channels, 1);
  using parallel::call;
  at::Tensor x = call(bn1, call(conv1, images)).relu_();
  if (!options.small_images) x = at::max_pool2d(x, 3, 2, 1);
  for (const auto& stage : {layer1, layer2, layer3, layer4}) x = call(stage, x);
  return call(fc, x.mean({2, 3}));
}

}  // namespace lockstep::models
