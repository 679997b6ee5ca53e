#include "lockstep/models/mlp.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <ostream>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/parallel/call.h"
#include "models/checks.h"

namespace lockstep::models {

MlpImpl::MlpImpl(const MlpOptions& options_) : options(options_) {
  if (options.sizes.size() < 2) {
    throw ConfigError(fmt::format(
        "[mlp] sizes = [{}]: needs the features of a sample and the outputs of each layer",
        fmt::join(options.sizes, ", ")));
  }
  for (size_t i = 0; i < options.sizes.size(); ++i) {
    check_positive("mlp", fmt::format("sizes[{}]", i), options.sizes[i]);
  }
  check_dropout("mlp", options.dropout);
  MlpImpl::reset();
}

void MlpImpl::reset() {
  layers_.clear();
  // The place in a Sequential is the name; activations and dropouts have places and no tensors.
  const size_t stride = options.dropout > 0 ? 3 : 2;
  for (size_t i = 0; i + 1 < options.sizes.size(); ++i) {
    layers_.push_back(register_module(
        std::to_string(i * stride),
        torch::nn::Linear(
            torch::nn::LinearOptions(options.sizes[i], options.sizes[i + 1]).bias(options.bias))));
  }
}

at::Tensor MlpImpl::forward(const at::Tensor& input) {
  at::Tensor x = flat_samples("mlp", input, options.sizes[0]);
  for (size_t i = 0; i < layers_.size(); ++i) {
    x = parallel::call(layers_[i], x);
    if (i + 1 == layers_.size()) break;
    x = activate(options.activation, x);
    if (options.dropout > 0) x = at::dropout(x, options.dropout, is_training());
  }
  return x;
}

void MlpImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format("lockstep::models::Mlp({}, {}, dropout={})",
                        fmt::join(options.sizes, " -> "), name_of(options.activation),
                        options.dropout);
}

}  // namespace lockstep::models
