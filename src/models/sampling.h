// One token from its logits.
#pragma once

#include <cstdint>
#include <span>

#include "lockstep/models/generate.h"

namespace lockstep::models {

// A number in [0, 1) that depends on these alone.
double uniform(uint64_t seed, int64_t sample, int64_t position);

// The first token whose cumulative probability exceeds `draw` of the total, in the order of
// numbers, among those that the options leave; the most likely one when temperature is 0. Throws
// Error where a logit is NaN or infinite (minus infinity is a token that is never drawn, unless all
// are).
int32_t sample_token(std::span<const float> logits, const GenerateOptions& options, double draw);

}  // namespace lockstep::models
