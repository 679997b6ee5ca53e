// A run whose signals stay noticed when it is over.
#pragma once

#include <optional>

#include "lockstep/core/preemption.h"
#include "lockstep/train/run.h"

namespace lockstep::train {

// run(). Makes `notice`, from its start on, where the run saves when a signal comes; until the
// caller destroys it those signals have no effect.
int run(const RunConfig& config, const Registry& registry, std::optional<PreemptionNotice>& notice);

}  // namespace lockstep::train
