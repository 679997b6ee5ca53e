// Among how many ranks a strategy divides the model.
#pragma once

#include <cstdint>

#include "lockstep/plan/strategy.h"

namespace lockstep::plan {

int64_t shard_ranks(Strategy strategy, const Machine& machine, int64_t ranks);

}  // namespace lockstep::plan
