#include "lockstep/core/exact_sum.h"

#include <fmt/format.h>

#include <bit>
#include <cmath>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

__extension__ using Wide = unsigned __int128;

constexpr int kBits = 32;
constexpr int64_t kMask = (int64_t{1} << kBits) - 1;
constexpr int kMantissaBits = 53;
constexpr int kLowestExponent = -1074;
// A digit gains less than 2^32 by an addition and holds 2^63.
constexpr int64_t kMostAdditions = int64_t{1} << 30;

}  // namespace

void ExactSum::add(double value) {
  const auto bits = std::bit_cast<uint64_t>(value);
  int exponent = static_cast<int>(bits >> (kMantissaBits - 1)) & 0x7ff;
  if (exponent == 0x7ff) throw ConfigError(fmt::format("[exact sum] {} is not finite", value));
  uint64_t mantissa = bits & ((uint64_t{1} << (kMantissaBits - 1)) - 1);
  if (exponent == 0) {
    exponent = 1;
  } else {
    mantissa |= uint64_t{1} << (kMantissaBits - 1);
  }
  const int shift = exponent - 1;
  const Wide wide = static_cast<Wide>(mantissa) << (shift % kBits);
  int64_t* digit = &digits_[static_cast<size_t>(shift / kBits)];
  const int64_t sign = static_cast<int64_t>(bits) < 0 ? -1 : 1;
  digit[0] += sign * static_cast<int64_t>(static_cast<uint64_t>(wide) & kMask);
  digit[1] += sign * static_cast<int64_t>(static_cast<uint64_t>(wide >> kBits) & kMask);
  digit[2] += sign * static_cast<int64_t>(static_cast<uint64_t>(wide >> (2 * kBits)));
  if (++additions_ == kMostAdditions) normalise();
}

void ExactSum::add(const ExactSum& other) {
  normalise();
  ExactSum addend = other;
  addend.normalise();
  for (size_t i = 0; i < digits_.size(); ++i) digits_[i] += addend.digits_[i];
  normalise();
}

void ExactSum::normalise() {
  int64_t carry = 0;
  for (size_t i = 0; i + 1 < digits_.size(); ++i) {
    const int64_t digit = digits_[i] + carry;
    digits_[i] = digit & kMask;
    carry = digit >> kBits;
  }
  digits_.back() += carry;
  additions_ = 0;
}

double ExactSum::value() const {
  ExactSum absolute = *this;
  absolute.normalise();
  const bool negative = absolute.digits_.back() < 0;
  if (negative) {
    for (int64_t& digit : absolute.digits_) digit = -digit;
    absolute.normalise();
  }
  const auto& digits = absolute.digits_;
  int top = kDigits - 1;
  while (top > 2 && digits[static_cast<size_t>(top)] == 0) --top;
  Wide leading = 0;
  for (int i = top; i > top - 3; --i) {
    leading = leading << kBits | static_cast<uint64_t>(digits[static_cast<size_t>(i)]);
  }
  bool rest = false;
  for (int i = 0; i < top - 2; ++i) rest = rest || digits[static_cast<size_t>(i)] != 0;
  const auto high = static_cast<uint64_t>(leading >> 64);
  const int width = high != 0 ? 128 - std::countl_zero(high)
                              : 64 - std::countl_zero(static_cast<uint64_t>(leading));
  const int dropped = width > kMantissaBits ? width - kMantissaBits : 0;
  auto kept = static_cast<uint64_t>(leading >> dropped);
  if (dropped > 0) {
    const Wide half = Wide{1} << (dropped - 1);
    const Wide below = leading & ((half << 1) - 1);
    if (below > half || (below == half && (rest || (kept & 1) != 0))) ++kept;
  }
  const double value =
      std::ldexp(static_cast<double>(kept), kBits * (top - 2) + dropped + kLowestExponent);
  return negative ? -value : value;
}

}  // namespace lockstep
