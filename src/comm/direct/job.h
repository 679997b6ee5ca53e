// Reducing collectives as direct exchanges.
#pragma once

#include <functional>

#include "comm/direct/exchange.h"
#include "comm/transport.h"

namespace lockstep::comm {

struct DirectJob {
  DirectCall call;
  // After the exchange. Holds the call's memory until then.
  std::function<void()> finish;
};

// An all_reduce, reduce or reduce_scatter over `ranks` ranks by a group of `size` members; an
// all_reduce without inputs and a reduce are of members that bring one node each. The tags are
// still to be set.
DirectJob direct_job(const Request& request, int rank, int size, int ranks);

}  // namespace lockstep::comm
