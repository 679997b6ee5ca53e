// Conversations that scripts lead: for supervised training, and to compare a score with.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/rl/embedded.h"
#include "lockstep/rl/environment.h"
#include "lockstep/rl/message.h"

namespace lockstep::rl {

// Who leads a conversation.
enum class Agent {
  Null,    // closes at once
  Random,  // draws from what is legal in each turn; told the ids and the reference
  // Follows the policy with probability `skill` (1: an oracle, which always earns 1). Otherwise the
  // ending is drawn from those that the request can have, without regard to the records: the form
  // is right, the decision is not. Consent is asked for, and obeyed seven times in ten.
  Script,
};

// Options of play().
struct PlayOptions {
  Agent agent = Agent::Script;
  double skill = 1;   // in [0, 1]
  uint64_t seed = 0;  // with the task it is what an agent draws from
};

// A conversation that is over.
struct Dialogue {
  Scene scene = {};
  // From the customer's request to the agent's last message. Those of Role::Assistant are what an
  // imitator learns.
  std::vector<Message> messages = {};
  Reward reward = {};
  End why = End::None;
};

// Plays a task. A pure function of its arguments. Throws ConfigError for a key that the domain does
// not have, or a skill outside [0, 1].
Dialogue play(const EmbeddedDomain& domain, const TaskKey& key, const PlayOptions& options = {});

}  // namespace lockstep::rl
