// ExactSums among a metric's integers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lockstep/core/exact_sum.h"

namespace lockstep::train {

// Makes room for `counts` integers and then `sums` ExactSums.
inline void make_room(std::vector<int64_t>& state, int64_t counts, int64_t sums) {
  if (state.empty()) state.resize(static_cast<size_t>(counts + sums * ExactSum::kDigits));
}

inline ExactSum sum_at(const std::vector<int64_t>& state, int64_t begin) {
  ExactSum::Digits digits{};
  std::copy_n(state.begin() + begin, ExactSum::kDigits, digits.begin());
  return ExactSum(digits);
}

inline void add_at(std::vector<int64_t>& state, int64_t begin, const ExactSum& addend) {
  ExactSum sum = sum_at(state, begin);
  sum.add(addend);
  std::copy_n(sum.digits().begin(), ExactSum::kDigits, state.begin() + begin);
}

}  // namespace lockstep::train
