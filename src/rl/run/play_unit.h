// The episodes of an iteration or an evaluation, played by the policy.
#pragma once

#include "lockstep/comm/group.h"
#include "lockstep/comm/key_value_store.h"
#include "lockstep/core/preemption.h"
#include "lockstep/models/transformer.h"
#include "lockstep/rl/learner.h"
#include "lockstep/rl/run.h"
#include "lockstep/text/tokenizer.h"
#include "rl/run/screen.h"

namespace lockstep::rl {

// A signal has come: what was under way is left undone.
struct Preempted {};

// Throws Preempted on all ranks, which all call it, where it is so on one.
void leave_where(bool is_so, const comm::Group& group);

// Set in the world's store by a rank that leaves a rollout since it has got a signal, which others
// may not have got, until all have left it.
inline constexpr const char* kNoticeKey = "three_domain/notice";

// Who plays.
struct Players {
  const comm::Group& group;
  const comm::KeyValueStore& store;  // of its ranks
  const Course& course;
  const RunOptions& options;
  const PreemptionNotice& notice;
  Learner& learner;
  models::Transformer& net;
  const text::Tokenizer& tokenizer;
};

// How tokens are drawn.
struct Sampling {
  double temperature = 1, top_p = 1;
};

// Every rank calls it. Throws Preempted on all ranks where a notice came to one that had not played
// all of its episodes, of which the others learn at their next lane, or within 0.1 s: a rollout may
// take longer than a scheduler waits, and is played again as it was. Throws Error on all ranks as
// check_environments().
Rollout play_unit(const Players& players, const RolloutPlan& plan, const Sampling& sampling,
                  RolloutLine& line);

}  // namespace lockstep::rl
