// The only code that divides a range among ranks.
#pragma once

#include <cstdint>

#include "lockstep/core/compiler.h"

namespace lockstep {

// A half-open range of indices.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;

  // How many indices those are.
  int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

// Who gets the remainder when a range does not divide evenly.
enum class Remainder {
  First,   // one more for each of the first ranks: 10 over 3 is 4, 3, 3
  Last,    // one more for each of the last ranks: 10 over 3 is 3, 3, 4; 11 over 4 is 2, 3, 3, 3
  Spread,  // one more here and there, evenly: 10 over 4 is 2, 3, 2, 3
};

// Part `index` of `count` contiguous parts.
struct Shard {
  int64_t index = 0;
  int64_t count = 1;

  // This part of [0, length). The parts of all indices cover it without gap or overlap, in order.
  // Throws ConfigError unless 0 <= index < count and length >= 0.
  Range of(int64_t length, Remainder remainder = Remainder::Spread) const;
};

}  // namespace lockstep
