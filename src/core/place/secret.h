// A secret of the job's ranks where nothing has given them one.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "core/security/job_secret.h"
#include "lockstep/core/place.h"

namespace lockstep {

// Whether LOCKSTEP_TOKEN or LOCKSTEP_TOKEN_FILE is set.
bool has_token();
// Whether a launcher or the user has given this process the job's secret or its token.
bool has_given_secret();

struct AgreedSecret {
  std::string text = {};                           // empty: none
  std::shared_ptr<SecretServer> server = nullptr;  // rank 0's; the others may still ask it
};

// Under mpirun over several hosts, what rank 0 has told with its address; under Slurm over several
// hosts, where this host has MUNGE, what rank 0's process hands out to those of this user. All
// ranks call it; the first call blocks until rank 0 is there, and later ones give the same. Throws
// CommError when it is not there within `timeout`, Error when rank 0 cannot serve.
AgreedSecret agreed_secret(const Place& place, std::chrono::milliseconds timeout);

}  // namespace lockstep
