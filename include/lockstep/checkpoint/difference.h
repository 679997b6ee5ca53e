// How far two tensors are apart.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/core/compiler.h"

namespace lockstep::checkpoint {

// |a - b| up to absolute + relative * |b| is not a difference.
struct Tolerance {
  double absolute = 0;
  double relative = 0;
};

// What difference() found.
struct Difference {
  int64_t elements = 0;
  int64_t differ = 0;  // numbers that differ by more than the tolerance, or NaN on one side only
  int64_t one_is_nan = 0;  // of these
  // Equal numbers with other bits: -0 and 0, or NaNs of another payload.
  int64_t only_bits = 0;
  double largest = 0;   // |a - b| over numbers that differ
  double relative = 0;  // and |a - b| / max(|a|, |b|)
  // Whether any numbers or bits differ.
  bool any() const { return differ > 0 || only_bits > 0; }
};

// Compares row-major bytes of equally many elements, of these dtypes ("F32", "BF16", "C64"; the two
// may differ). Parts of complex numbers are counted by themselves. Where the dtypes differ, bits
// are not compared. Throws CheckpointError for a dtype that is not known.
Difference difference(const std::string& dtype_a, std::string_view a, const std::string& dtype_b,
                      std::string_view b, const Tolerance& tolerance = {});

}  // namespace lockstep::checkpoint
