#pragma once

#include <cstdint>
#include <initializer_list>

#include "core/mix.h"

namespace lockstep::rl {

// A number that looks random and depends on these alone: h = mix(h ^ x) for each x.
inline uint64_t counter(std::initializer_list<uint64_t> numbers) {
  uint64_t h = 0;
  for (const uint64_t x : numbers) h = mix(h ^ x);
  return h;
}

// In [0, 1).
inline double unit_interval(uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

}  // namespace lockstep::rl
