// The model of a run, and how options say that it plays and learns.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "lockstep/comm/world.h"
#include "lockstep/rl/episode.h"
#include "lockstep/rl/learner.h"
#include "lockstep/rl/run.h"

namespace lockstep::rl {

// Loads the model of `folder`, or, where that is empty, warms a tiny one up. `say` is told of the
// warm-up. Every rank calls it. Throws ConfigError on all ranks.
WarmedUp make_policy(const comm::World& world, const Course& course, const RunOptions& options,
                     const std::string& folder, const std::function<void(std::string)>& say);

Limits limits_of(const RunOptions& options);

LearnerOptions learner_options(const RunOptions& options, int64_t vocabulary);

}  // namespace lockstep::rl
