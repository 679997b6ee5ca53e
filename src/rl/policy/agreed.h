// What all ranks agree on before an update: each computes it from the outcomes of all episodes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/rl/grpo.h"
#include "lockstep/rl/learner.h"

namespace lockstep::rl {

// Whether the environment died, so that the outcome says nothing of the agent.
bool is_lost(const Outcome& outcome);

struct Agreed {
  std::vector<double> advantages;  // by episode
  std::vector<uint8_t> kept;
  GlobalCounts counts;
};

// Fills what `learnt` has before the update. Lost episodes are in none of it: a group's advantages
// are over those that are left, and a group of one is one of equal rewards.
Agreed agree(const Rollout& rollout, const LearnerOptions& options, Learnt& learnt);

// Why these episodes are not those of a rank with `own_lanes` of a learner's `lanes`; nothing when
// all is well.
std::string misfit(const Rollout& rollout, int64_t own_lanes, int64_t lanes);

}  // namespace lockstep::rl
