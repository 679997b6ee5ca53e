// How this process last divided samples among ranks, for Ddp to compare: where the ranks' orders
// differ, samples come several times or never.
#pragma once

#include <cstdint>

#include "lockstep/data/sampler.h"

namespace lockstep::data {

// A pass over a part begins or goes on. Any thread.
void note_order(const SamplerState& state, const Shard& part);

// The same number for the same order; 0 before the first pass. Samples of one part only are not
// divided, and do not count.
uint64_t divided_order();

}  // namespace lockstep::data
