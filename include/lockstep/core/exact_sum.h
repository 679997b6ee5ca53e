// Sums of floating-point numbers without rounding, in any order.
#pragma once

#include <array>
#include <cstdint>

#include "lockstep/core/compiler.h"

namespace lockstep {

// A fixed-point number wide enough for every finite double and 2^63 of them (Kulisch, "Computer
// arithmetic and validity", 2008). Sums of the same numbers are equal, however they were divided
// among ranks and in any order; 544 bytes, some 4 ns an addition.
class ExactSum {
 public:
  // In base 2^32, the lowest first, in units of 2^-1074. What ranks add up with an all_reduce of
  // int64, after normalise().
  static constexpr int64_t kDigits = 68;
  using Digits = std::array<int64_t, kDigits>;

  ExactSum() = default;
  // The sum whose digits() were saved or communicated.
  explicit ExactSum(const Digits& digits) : digits_(digits) { normalise(); }

  // Throws ConfigError for NaN and infinity, and then nothing has changed.
  void add(double value);
  // The sum of both.
  void add(const ExactSum& other);

  // The nearest double, ties to even; infinite when it is beyond the largest.
  double value() const;

  // Equal for equal sums. Each digit but the last is in [0, 2^32).
  const Digits& digits() {
    normalise();
    return digits_;
  }

 private:
  void normalise();

  Digits digits_{};
  int64_t additions_ = 0;  // since the digits were normalised
};

}  // namespace lockstep
