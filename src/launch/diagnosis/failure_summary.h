// How a job that has failed ended: the cause first, then what the others did.
#pragma once

#include <string>
#include <vector>

#include "launch/job/outcome.h"

namespace lockstep::launch {

// The lines of the report: the cause, then the others, where the ranks were, and what to do. None
// for a success.
std::vector<std::string> report(const Outcome& outcome);

// "stopped by SIGTERM": the signal has ended the job.
std::string stopped_by(int signal);

}  // namespace lockstep::launch
