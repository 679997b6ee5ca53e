#include "lockstep/models/convnet.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel/call.h"
#include "models/checks.h"

namespace lockstep::models {

namespace nn = torch::nn;

ConvNetImpl::ConvNetImpl(const ConvNetOptions& options_) : options(options_) {
  check_positive("convnet", "in_channels", options.in_channels);
  check_positive("convnet", "classes", options.classes);
  if (options.channels.empty() || options.channels.size() > 16) {
    throw ConfigError(fmt::format("[convnet] channels has {} entries: needs 1 to 16, one a stage",
                                  options.channels.size()));
  }
  for (size_t i = 0; i < options.channels.size(); ++i) {
    check_positive("convnet", fmt::format("channels[{}]", i), options.channels[i]);
  }
  check_dropout("convnet", options.dropout);
  ConvNetImpl::reset();
}

void ConvNetImpl::reset() {
  nn::Sequential stages;
  int64_t in = options.in_channels;
  for (const int64_t out : options.channels) {
    stages->push_back(
        nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1).bias(!options.batch_norm)));
    if (options.batch_norm) stages->push_back(nn::BatchNorm2d(out));
    stages->push_back(nn::ReLU());
    stages->push_back(nn::MaxPool2d(2));
    in = out;
  }
  features = register_module("features", stages);
  classifier = register_module("classifier", nn::Linear(in, options.classes));
}

at::Tensor ConvNetImpl::forward(const at::Tensor& images) {
  check_images("convnet", images, options.in_channels, int64_t{1} << options.channels.size());
  at::Tensor x = parallel::call(features, images).mean({2, 3});
  if (options.dropout > 0) x = at::dropout(x, options.dropout, is_training());
  return parallel::call(classifier, x);
}

}  // namespace lockstep::models
