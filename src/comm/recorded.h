// Calls that the flight recorder knows of.
#pragma once

#include "comm/transport.h"

namespace lockstep::comm {

// Starts the request; what it is, when it began and that it is waited in is recorded, except in a
// group of one.
Work start_recorded(Transport& transport, Request request);

}  // namespace lockstep::comm
