// A secret of the job's ranks where nothing has given them one.
#pragma once

#include <chrono>
#include <string>

#include "lockstep/core/place.h"

namespace lockstep {

// Whether LOCKSTEP_TOKEN or LOCKSTEP_TOKEN_FILE is set.
bool has_token();
// Whether a launcher or the user has given this process the job's secret or its token.
bool has_given_secret();

// Under mpirun over several hosts, what rank 0 has told with its address; under Slurm over several
// hosts, where this host has MUNGE, and under both on one host, what rank 0's process hands out to
// those of this user. Empty where there is none. All ranks call it; the first call blocks until
// rank 0 is there, and later ones give the same. Rank 0 serves the others until end_serving(), also
// where its World cannot be made and the program tries again. Throws CommError when rank 0 is not
// there within `timeout`, or has no MUNGE where this host has; Error when rank 0 cannot serve.
std::string agreed_secret(const Place& place, std::chrono::milliseconds timeout);
// All ranks have met.
void end_serving(const Place& place);

}  // namespace lockstep
