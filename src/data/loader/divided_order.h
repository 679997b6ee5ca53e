// How this process last divided samples among ranks, for Ddp and Fsdp to compare: where the ranks'
// orders differ, samples come several times or never.
#pragma once

#include <cstdint>

#include "lockstep/data/sampler.h"

namespace lockstep::data {

// A pass over a part begins or goes on. Any thread.
void note_order(const SamplerState& state, const Shard& part);

// Counts the passes that have begun or gone on.
uint64_t divided_passes();

// The same number for the same seed and shuffle; 0 where no pass has begun since there were so
// many. Samples of one part only are not divided, and do not count.
uint64_t divided_order(uint64_t since);

}  // namespace lockstep::data
