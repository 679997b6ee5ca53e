// How long a wait may last.
#pragma once

#include <algorithm>
#include <chrono>

namespace lockstep {

// Not below zero, and ten years where it is longer, as milliseconds::max() is: no wait needs more,
// and the clock would overflow.
template <class Duration>
constexpr Duration bounded(Duration time) {
  return std::clamp<Duration>(time, Duration::zero(), std::chrono::years(10));
}

}  // namespace lockstep
