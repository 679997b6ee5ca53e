#include "lockstep/models/activation.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "core/nearest.h"
#include "lockstep/core/error.h"

namespace lockstep::models {
namespace {

constexpr std::array<std::pair<std::string_view, Activation>, 8> kNames{{
    {"relu", Activation::Relu},
    {"leaky_relu", Activation::LeakyRelu},
    {"elu", Activation::Elu},
    {"gelu", Activation::Gelu},
    {"silu", Activation::Silu},
    {"tanh", Activation::Tanh},
    {"sigmoid", Activation::Sigmoid},
    {"identity", Activation::Identity},
}};

}  // namespace

Activation activation_named(std::string_view name) {
  std::vector<std::string> known;
  for (const auto& [text, activation] : kNames) {
    if (text == name) return activation;
    known.emplace_back(text);
  }
  throw ConfigError(fmt::format("[models] activation '{}' is unknown: use one of {}{}", name,
                                fmt::join(known, ", "),
                                hint_of(name, known, "; did you mean '", "'?")));
}

std::string_view name_of(Activation activation) {
  for (const auto& [text, known] : kNames) {
    if (known == activation) return text;
  }
  throw ConfigError(fmt::format("[models] {} is not an activation", static_cast<int>(activation)));
}

at::Tensor activate(Activation activation, const at::Tensor& input) {
  switch (activation) {
    case Activation::Relu:
      return at::relu(input);
    case Activation::LeakyRelu:
      return at::leaky_relu(input, 0.01);
    case Activation::Elu:
      return at::elu(input);
    case Activation::Gelu:
      return at::gelu(input);
    case Activation::Silu:
      return at::silu(input);
    case Activation::Tanh:
      return at::tanh(input);
    case Activation::Sigmoid:
      return at::sigmoid(input);
    case Activation::Identity:
      return input;
  }
  throw ConfigError(fmt::format("[models] {} is not an activation", static_cast<int>(activation)));
}

}  // namespace lockstep::models
