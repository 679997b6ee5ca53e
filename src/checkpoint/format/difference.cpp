#include "lockstep/checkpoint/difference.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "checkpoint/format/conversion.h"
#include "checkpoint/format/json.h"
#include "lockstep/checkpoint/error.h"
#include "lockstep/checkpoint/tensor_files.h"

namespace lockstep::checkpoint {
namespace {

// long double has all bits of 64-bit integers on x86-64; elsewhere the largest differences of such
// are rounded.
using Real = long double;

template <class T>
Real number(const char* at) {
  return static_cast<Real>(load<T>(at));
}

struct Float {
  int exponent_bits, fraction_bits, bias;
  // How infinities and NaNs are written: as IEEE 754 has them; only NaN, with all bits set; only
  // NaN, as the negative zero.
  enum { Ieee, AllOnes, NegativeZero } special;
};

Real decode(uint32_t bits, const Float& format) {
  const uint32_t fraction_mask = (1u << format.fraction_bits) - 1;
  const uint32_t exponent_mask = (1u << format.exponent_bits) - 1;
  const uint32_t fraction = bits & fraction_mask;
  const uint32_t exponent = bits >> format.fraction_bits & exponent_mask;
  const bool negative = (bits >> (format.fraction_bits + format.exponent_bits) & 1) != 0;
  constexpr Real kNan = std::numeric_limits<Real>::quiet_NaN();
  Real value;
  if (format.special == Float::Ieee && exponent == exponent_mask) {
    value = fraction != 0 ? kNan : std::numeric_limits<Real>::infinity();
  } else if (format.special == Float::AllOnes && exponent == exponent_mask &&
             fraction == fraction_mask) {
    value = kNan;
  } else if (format.special == Float::NegativeZero && negative && exponent == 0 && fraction == 0) {
    return kNan;
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<Real>(fraction), 1 - format.bias - format.fraction_bits);
  } else {
    value = std::ldexp(static_cast<Real>(fraction + fraction_mask + 1),
                       static_cast<int>(exponent) - format.bias - format.fraction_bits);
  }
  return negative ? -value : value;
}

// https://arxiv.org/abs/2209.05433, https://arxiv.org/abs/2206.02915 (FNUZ), OCP Microscaling
// (E8M0)
Real f16(const char* at) { return decode(load<uint16_t>(at), {5, 10, 15, Float::Ieee}); }
Real e5m2(const char* at) { return decode(load<uint8_t>(at), {5, 2, 15, Float::Ieee}); }
Real e4m3(const char* at) { return decode(load<uint8_t>(at), {4, 3, 7, Float::AllOnes}); }
Real e5m2_fnuz(const char* at) {
  return decode(load<uint8_t>(at), {5, 2, 16, Float::NegativeZero});
}
Real e4m3_fnuz(const char* at) { return decode(load<uint8_t>(at), {4, 3, 8, Float::NegativeZero}); }
Real e8m0(const char* at) {
  const auto bits = load<uint8_t>(at);
  return bits == 0xff ? std::numeric_limits<Real>::quiet_NaN() : std::ldexp(Real{1}, bits - 127);
}
Real bf16(const char* at) {
  return static_cast<Real>(std::bit_cast<float>(uint32_t{load<uint16_t>(at)} << 16));
}

struct Reader {
  const char* name;
  Real (*read)(const char*);
  int64_t bytes;
};
constexpr Reader kReaders[] = {{"BOOL", number<uint8_t>, 1},
                               {"U8", number<uint8_t>, 1},
                               {"I8", number<int8_t>, 1},
                               {"F8_E5M2", e5m2, 1},
                               {"F8_E4M3", e4m3, 1},
                               {"F8_E8M0", e8m0, 1},
                               {"F8_E5M2FNUZ", e5m2_fnuz, 1},
                               {"F8_E4M3FNUZ", e4m3_fnuz, 1},
                               {"I16", number<int16_t>, 2},
                               {"U16", number<uint16_t>, 2},
                               {"F16", f16, 2},
                               {"BF16", bf16, 2},
                               {"I32", number<int32_t>, 4},
                               {"U32", number<uint32_t>, 4},
                               {"F32", number<float>, 4},
                               {"I64", number<int64_t>, 8},
                               {"U64", number<uint64_t>, 8},
                               {"F64", number<double>, 8},
                               {"C64", number<float>, 4},
                               {"C128", number<double>, 8}};

const Reader& reader_of(const std::string& dtype) {
  for (const auto& reader : kReaders) {
    if (dtype == reader.name) return reader;
  }
  throw CheckpointError(fmt::format("[checkpoint] unknown dtype {}", in_quotes(dtype)));
}

}  // namespace

Difference difference(const std::string& dtype_a, std::string_view a, const std::string& dtype_b,
                      std::string_view b, const Tolerance& tolerance) {
  const Reader &read_a = reader_of(dtype_a), &read_b = reader_of(dtype_b);
  const bool same_dtype = dtype_a == dtype_b;
  Difference found{.elements = static_cast<int64_t>(a.size()) / read_a.bytes};
  if (static_cast<int64_t>(b.size()) != found.elements * read_b.bytes) {
    throw CheckpointError(
        fmt::format("[checkpoint] {} bytes of {} and {} of {} are not equally many elements",
                    a.size(), dtype_a, b.size(), dtype_b));
  }
  if (same_dtype && a == b) return found;
  for (int64_t i = 0; i < found.elements; ++i) {
    const char *one = a.data() + i * read_a.bytes, *other = b.data() + i * read_b.bytes;
    if (same_dtype && std::memcmp(one, other, read_a.bytes) == 0) continue;
    const Real x = read_a.read(one), y = read_b.read(other);
    if (x == y || (std::isnan(x) && std::isnan(y))) {
      if (same_dtype && tolerance.absolute == 0 && tolerance.relative == 0) ++found.only_bits;
      continue;
    }
    if (std::isnan(x) || std::isnan(y)) {
      ++found.differ;
      ++found.one_is_nan;
      continue;
    }
    const Real apart = std::abs(x - y), most = std::max(std::abs(x), std::abs(y));
    if (std::isfinite(apart) && apart <= tolerance.absolute + tolerance.relative * std::abs(y)) {
      continue;
    }
    ++found.differ;
    found.largest = std::max(found.largest, static_cast<double>(apart));
    found.relative =
        std::max(found.relative, std::isinf(most) ? std::numeric_limits<double>::infinity()
                                                  : static_cast<double>(apart / most));
  }
  return found;
}

}  // namespace lockstep::checkpoint
