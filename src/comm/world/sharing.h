// Whether the ranks of a host can really share memory.
#pragma once

#include <chrono>
#include <string>

#include "comm/store/store.h"
#include "comm/world/topology.h"

namespace lockstep::comm {

struct Sharing {
  // The same, but that ranks of a host whose ranks cannot are on hosts of their own.
  Topology layout;
  // Which cannot, and why; empty when all can.
  std::string problem;
};

// Every rank calls it; all are told the same. The ranks of each host try it with one page. Throws
// CommError when the store does.
Sharing try_sharing(const Store& store, int rank, Topology layout,
                    std::chrono::milliseconds timeout);

}  // namespace lockstep::comm
