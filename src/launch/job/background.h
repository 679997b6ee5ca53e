// Runs work that may wait for a disk beside the launcher's thread.
#pragma once

#include <functional>
#include <vector>

#include "core/network/address.h"
#include "launch/job/outcome.h"
#include "launch/job/session.h"
#include "launch/rendezvous/outside.h"

namespace lockstep::launch {

// Runs `task` on a thread of its own and waits for its end, while this thread continues to handle
// signals and `outside` (which may be null). Rethrows what the task throws. False when a signal or
// an order from another host came first, which `outcome` then holds; the task may still be at work,
// and must own what it uses.
[[nodiscard]] bool run_in_background(Session& session, Outside* outside, Outcome& outcome,
                                     std::function<void()> task);

// The addresses of a host; a name server that does not answer may take half a minute. None when the
// name is not known, and when a signal came first, which `outcome` then holds.
[[nodiscard]] std::vector<Address> resolve_in_background(Session& session, Outcome& outcome,
                                                         const Endpoint& endpoint);

}  // namespace lockstep::launch
