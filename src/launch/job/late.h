// When ranks that still run after others have ended are reported.
#pragma once

#include <chrono>

#include "lockstep/core/environment.h"

namespace lockstep::launch {

// From when the first rank, or all ranks of a host, have exited with status 0 until those that
// still run are named. Throws ConfigError for a wrong LOCKSTEP_LATE_RANKS.
inline std::chrono::nanoseconds late_after() {
  return std::chrono::seconds(env_int("LOCKSTEP_LATE_RANKS", 1, 1'000'000).value_or(30));
}

}  // namespace lockstep::launch
