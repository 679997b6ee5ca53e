// How much memory this process has.
#pragma once

#include <cstdint>

namespace lockstep::train {

// Resident, in bytes; 0 where /proc does not say.
int64_t resident_bytes();

}  // namespace lockstep::train
