// What the ranks of this host are in one attempt of a job: the time from one start of all ranks
// to the end of all.
#pragma once

#include <cstdint>
#include <string>

#include "core/files/fd.h"
#include "core/security/token.h"

namespace lockstep::launch {

struct Plan {
  int local_ranks = 1;
  int world_size = 1;
  int first_rank = 0;  // of local rank 0; the others of this host follow it
  int node_rank = 0;
  int nodes = 1;
  std::string master_addr = "127.0.0.1";
  uint16_t master_port = 0;
  // Already listens at master_addr:master_port. For rank 0 alone; empty where rank 0 is not of this
  // host, or binds the port itself.
  Fd listener = {};
  // The same at each start of the job, and no other job's.
  std::string job = {};
  // The secret of the job's ranks (core/security/token.h).
  Digest job_key = random_bytes();
  int restarts = 0;      // how many attempts there were before
  int max_restarts = 0;  // how many there may be
};

}  // namespace lockstep::launch
