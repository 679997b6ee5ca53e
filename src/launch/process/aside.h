// Runs work that may wait for a disk beside the launcher's thread.
#pragma once

#include <functional>

#include "launch/job/outcome.h"
#include "launch/job/session.h"
#include "launch/rendezvous/outside.h"

namespace lockstep::launch {

// Runs `task` on a thread of its own and waits for its end, while this thread continues to handle
// signals and `outside` (which may be null). Rethrows what the task throws. False when a signal or
// an order from another host came first, which `outcome` then holds; the task may still be at work,
// and must own what it uses.
[[nodiscard]] bool do_aside(Session& session, Outside* outside, Outcome& outcome,
                            std::function<void()> task);

}  // namespace lockstep::launch
