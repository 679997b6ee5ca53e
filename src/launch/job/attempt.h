// One attempt of a job on this host: from a plan to how it ended.
#pragma once

#include "launch/job/outcome.h"
#include "launch/job/plan.h"
#include "launch/job/session.h"
#include "launch/rendezvous/outside.h"

namespace lockstep::launch {

// Starts the ranks that `plan` gives this host and stays until no descendant of this process is
// left. Called once for each attempt of a job, one after another; each has a control segment of its
// own, at attempt 0. Failures have been reported on stderr when it returns. `outside` may be null.
// Throws StartError or Error when a rank cannot be started; nothing is left of it then.
Outcome run_attempt(Session& session, Plan plan, Outside* outside = nullptr);

}  // namespace lockstep::launch
