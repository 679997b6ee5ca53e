// What the built-in models refuse.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

namespace lockstep::models {

// Throws ConfigError unless `value` >= 1. `model` as "mlp", `what` as "sizes[1]".
void check_positive(std::string_view model, std::string_view what, int64_t value);

// Throws ConfigError unless 0 <= probability < 1.
void check_dropout(std::string_view model, double probability);

// The samples as n x `features`; throws ConfigError when they have another number of elements.
at::Tensor flat_samples(std::string_view model, const at::Tensor& input, int64_t features);

// Throws ConfigError unless `images` is n x channels x height x width, both >= `least`.
void check_images(std::string_view model, const at::Tensor& images, int64_t channels,
                  int64_t least);

}  // namespace lockstep::models
