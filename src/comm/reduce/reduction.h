// What the kernels do for an operation on tensors.
#pragma once

#include "comm/reduce/reduce.h"
#include "comm/transport.h"

namespace lockstep::comm {

// For the request's tensors, of `ranks` ranks.
Reduction reduction_of(const Request& request, int ranks);

}  // namespace lockstep::comm
