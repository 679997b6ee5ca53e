// The variables of one rank.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "launch/job/plan.h"
#include "launch/job/run.h"

namespace lockstep::launch {

using Variables = std::map<std::string, std::string>;

// A name for a job that no other job of this machine has.
std::string random_run_id();

// What torchrun gives its workers, for the rank that is `local` on this host. OMP_NUM_THREADS is
// among them only when the caller has not set it, or options.environment has the same value.
Variables rank_variables(const Options& options, const Plan& plan, int local);

// This process's environment with `variables` in place of all variables about a job, as
// "NAME=value".
std::vector<std::string> environment_with(const Variables& variables);

}  // namespace lockstep::launch
