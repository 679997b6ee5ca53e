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

// How much longer than `most` a wait took because this process was stopped meanwhile, as by Ctrl-Z:
// nothing where a busy machine may be the reason.
inline std::chrono::steady_clock::duration standstill(std::chrono::steady_clock::duration took,
                                                      std::chrono::steady_clock::duration most) {
  constexpr std::chrono::seconds kBusy{1};
  return took > most + kBusy ? took - most : std::chrono::steady_clock::duration::zero();
}

}  // namespace lockstep
