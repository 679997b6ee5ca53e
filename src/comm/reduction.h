// What the kernels do for an operation on tensors.
#pragma once

#include "comm/reduce.h"
#include "comm/transport.h"

namespace lockstep::comm {

// For tensors of `dtype` of `ranks` ranks.
Reduction reduction_of(ReduceOp op, at::ScalarType dtype, int ranks);

}  // namespace lockstep::comm
