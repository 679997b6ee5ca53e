#pragma once

#include <cstdint>

namespace lockstep {

// count / by, rounded up, for count >= 0 and any by > 0: 2^63 - 1 stands for "all at once".
constexpr int64_t divided_up(int64_t count, int64_t by) {
  return count / by + (count % by > 0 ? 1 : 0);
}

// The least multiple of `unit` that is not below `count`; of the same range.
constexpr int64_t rounded_up(int64_t count, int64_t unit) { return divided_up(count, unit) * unit; }

}  // namespace lockstep
