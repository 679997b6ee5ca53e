// The non-linear functions between the layers of the built-in models.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "lockstep/core/compiler.h"

namespace lockstep::models {

// The activations of torch::nn, with their defaults: GELU is the exact one, LeakyRelu's slope is
// 0.01.
enum class Activation { Relu, LeakyRelu, Elu, Gelu, Silu, Tanh, Sigmoid, Identity };

// The one of this name: "relu", "leaky_relu", "elu", "gelu", "silu", "tanh", "sigmoid", "identity".
// Throws ConfigError that names them all and the nearest one.
Activation activation_named(std::string_view name);

// The name of it.
std::string_view name_of(Activation activation);

// The function's value for each element.
at::Tensor activate(Activation activation, const at::Tensor& input);

}  // namespace lockstep::models
