// What a call is beside its transport's part: its order behind dropped operations, contiguous
// tensors, and its record.
#pragma once

#include "comm/transport.h"

namespace lockstep::comm {

// Starts a request whose tensors may lie in memory in any way. What it is, when it began and that
// it is waited in is recorded, except in a group of one. Dropped, it is finished by the group.
Work start_call(Transport& transport, Request&& request);

}  // namespace lockstep::comm
