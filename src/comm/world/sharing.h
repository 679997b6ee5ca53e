// Whether the ranks of a host can really share memory.
#pragma once

#include <chrono>
#include <string>

#include "comm/store/store.h"
#include "comm/world/topology.h"

namespace lockstep::comm {

struct Sharing {
  // The given layout, in which ranks of a host that cannot share memory count as hosts of their
  // own.
  Topology layout;
  // Which cannot, and why; empty when all can.
  std::string problem;
};

// Every rank calls it and gets the same result. The ranks of each host try it with one page. Throws
// CommError when the store does.
Sharing try_sharing(const Store& store, int rank, Topology layout,
                    std::chrono::milliseconds timeout);

}  // namespace lockstep::comm
