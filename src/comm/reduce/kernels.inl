// The reduction, included once per instruction set with LOCKSTEP_ISA naming the namespace.
// Blocks of kBlock elements stay in the first-level cache while the tree over the ranks is walked.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "comm/reduce/reduce.h"

namespace lockstep::comm::LOCKSTEP_ISA {
namespace {

constexpr int64_t kBlock = 1024;

// Floats of 16 and 8 bits are storage only: blocks are widened, combined in float32 and rounded
// back to nearest even.
struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};
struct E4M3 {
  uint8_t bits;
};
struct E5M2 {
  uint8_t bits;
};
template <class T>
constexpr bool is_storage = std::is_same_v<T, Half> || std::is_same_v<T, Brain> ||
                            std::is_same_v<T, E4M3> || std::is_same_v<T, E5M2>;

template <class Part>
struct Complex {
  Part real, imaginary;
};
template <class T>
constexpr bool is_complex = std::is_same_v<T, Complex<float>> || std::is_same_v<T, Complex<double>>;

inline float bits_to_float(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline uint32_t float_to_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

inline float widen_one(Brain value) { return bits_to_float(uint32_t{value.bits} << 16); }
inline Brain narrow_one(float value, Brain) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return {static_cast<uint16_t>(value != value ? 0x7fc0 : rounded)};
}

// IEEE half without hardware help: exact scaling by powers of two handles subnormals.
inline float widen_one(Half value) {
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16, rest = value.bits & 0x7fffu;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000u | ((rest & 0x3ff) << 13));
  return bits_to_float(sign | float_to_bits(bits_to_float(rest << 13) * 0x1p112f));
}
inline Half narrow_one(float value, Half) {
  const uint32_t bits = float_to_bits(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
  if (rest >= 0x477ff000)
    return {static_cast<uint16_t>(sign | 0x7c00)};  // rounds above the largest half
  if (rest < 0x38800000) {  // subnormal: adding 0.5 leaves the rounded value in the last bits
    return {static_cast<uint16_t>(sign | (float_to_bits(bits_to_float(rest) + 0.5f) - 0x3f000000))};
  }
  return {static_cast<uint16_t>(sign | ((rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13))};
}

// All 256 values of a float with one byte. The highest exponent stands for infinity and NaN, or,
// without infinity, the highest pattern alone for NaN.
constexpr std::array<float, 256> byte_floats(int mantissa_bits, int bias, bool has_infinity) {
  std::array<float, 256> all{};
  for (int pattern = 0; pattern < 256; ++pattern) {
    const int rest = pattern & 0x7f, mantissa = rest & ((1 << mantissa_bits) - 1);
    int exponent = rest >> mantissa_bits;
    float value = static_cast<float>(mantissa + (exponent > 0 ? 1 << mantissa_bits : 0));
    for (exponent = std::max(exponent, 1) - bias - mantissa_bits; exponent > 0; --exponent)
      value *= 2;
    for (; exponent < 0; ++exponent) value /= 2;
    if (has_infinity && rest >= 0x7c) value = HUGE_VALF;
    if (has_infinity ? rest > 0x7c : rest == 0x7f) value = __builtin_nanf("");
    all[pattern] = pattern < 0x80 ? value : -value;
  }
  return all;
}
inline constexpr auto kE4M3 = byte_floats(3, 7, false);
inline constexpr auto kE5M2 = byte_floats(2, 15, true);

inline float widen_one(E4M3 value) { return kE4M3[value.bits]; }
inline float widen_one(E5M2 value) { return kE5M2[value.bits]; }

// A positive float32 with fewer bits, to nearest even; may be above the format's largest. A
// subnormal comes from an addition that leaves the rounded value in the last bits.
template <int mantissa_bits, int bias>
inline uint32_t rounded_to_byte(uint32_t rest) {
  constexpr uint32_t kDropped = 23 - mantissa_bits;
  constexpr uint32_t kLeast = static_cast<uint32_t>(128 - bias) << 23;
  constexpr uint32_t kShift = static_cast<uint32_t>(128 - bias + 23 - mantissa_bits) << 23;
  if (rest < kLeast) return float_to_bits(bits_to_float(rest) + bits_to_float(kShift)) - kShift;
  const uint32_t rebased = rest - (static_cast<uint32_t>(127 - bias) << 23);
  return (rebased + (1u << (kDropped - 1)) - 1 + ((rebased >> kDropped) & 1)) >> kDropped;
}
inline E4M3 narrow_one(float value, E4M3) {
  const uint32_t bits = float_to_bits(value), rest = bits & 0x7fffffff;
  uint32_t result = 0x7f;
  if (rest <= 0x7f800000)
    result = rest >= 0x43e00000 ? 0x7e : std::min(rounded_to_byte<3, 7>(rest), 0x7eu);
  return {static_cast<uint8_t>(((bits >> 24) & 0x80) | result)};
}
inline E5M2 narrow_one(float value, E5M2) {
  const uint32_t bits = float_to_bits(value), rest = bits & 0x7fffffff;
  uint32_t result = 0x7f;
  if (rest <= 0x7f800000) result = rest >= 0x47800000 ? 0x7c : rounded_to_byte<2, 15>(rest);
  return {static_cast<uint8_t>(((bits >> 24) & 0x80) | result)};
}

template <class T>
void widen(float* to, const T* from, int64_t n) {
  int64_t i = 0;
#ifdef __F16C__
  if constexpr (std::is_same_v<T, Half>) {
    for (; i + 8 <= n; i += 8) {
      _mm256_storeu_ps(
          to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    }
  }
#endif
  for (; i < n; ++i) to[i] = widen_one(from[i]);
}

template <class T>
void narrow(T* to, const float* from, int64_t n) {
  int64_t i = 0;
#ifdef __F16C__
  if constexpr (std::is_same_v<T, Half>) {
    for (; i + 8 <= n; i += 8) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    }
  }
#endif
  for (; i < n; ++i) to[i] = narrow_one(from[i], T{});
}

// Whole numbers are added and multiplied as unsigned: wrapping is defined there.
template <class T>
using Wrapping =
    std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>, std::type_identity<T>>::type;

template <Combine C, class T>
inline T combine(T a, T b) {
  using W = Wrapping<T>;
  // A NaN on either side wins, as torch::minimum and maximum have it.
  if constexpr (C == Combine::Sum) return static_cast<T>(static_cast<W>(a) + static_cast<W>(b));
  // Promotion to int would overflow for uint16_t, so the product is taken in 64 bits.
  else if constexpr (C == Combine::Product && std::is_integral_v<T>)
    return static_cast<T>(uint64_t{static_cast<W>(a)} * static_cast<W>(b));
  else if constexpr (C == Combine::Product)
    return a * b;
  else if constexpr (C == Combine::Min && std::is_floating_point_v<T>)
    return (a < b || a != a) ? a : b;
  else if constexpr (C == Combine::Max && std::is_floating_point_v<T>)
    return (a > b || a != a) ? a : b;
  else if constexpr (C == Combine::Min)
    return std::min(a, b);
  else if constexpr (C == Combine::Max)
    return std::max(a, b);
  else if constexpr (std::is_integral_v<T> && C == Combine::And)
    return static_cast<T>(a & b);
  else if constexpr (std::is_integral_v<T> && C == Combine::Or)
    return static_cast<T>(a | b);
  else if constexpr (std::is_integral_v<T> && C == Combine::Xor)
    return static_cast<T>(a ^ b);
  else
    return a;  // bitwise on floats: refused by Group
}

// Each product is rounded before the next step, on every instruction set: in one loop GCC 12
// makes fused operations of them with AVX-512, regardless of -ffp-contract.
template <class Part>
void multiply_block(Complex<Part>* to, const Complex<Part>* a, const Complex<Part>* b, int64_t n) {
  Part same[kBlock], other[kBlock], left[kBlock], right[kBlock];
  for (int64_t i = 0; i < n; ++i) same[i] = a[i].real * b[i].real;
  for (int64_t i = 0; i < n; ++i) other[i] = a[i].imaginary * b[i].imaginary;
  for (int64_t i = 0; i < n; ++i) left[i] = a[i].real * b[i].imaginary;
  for (int64_t i = 0; i < n; ++i) right[i] = a[i].imaginary * b[i].real;
  for (int64_t i = 0; i < n; ++i) to[i] = {same[i] - other[i], left[i] + right[i]};
}

// to = a + b, all of length n; `to` may be a or b.
template <Combine C, class T>
void combine_block(T* to, const T* a, const T* b, int64_t n) {
  if constexpr (is_complex<T>) {
    multiply_block(to, a, b, n);
  } else if constexpr (is_storage<T>) {
    float left[kBlock], right[kBlock];
    widen(left, a, n);
    widen(right, b, n);
    combine_block<C>(left, left, right, n);
    narrow(to, left, n);
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) to[i] = combine<C>(a[i], b[i]);
  }
}

template <class T>
void divide_block(T* values, int64_t n, int by) {
  if constexpr (is_complex<T>) {
    // An average is one of the parts.
  } else if constexpr (is_storage<T>) {
    float wide[kBlock];
    widen(wide, values, n);
    divide_block(wide, n, by);
    narrow(values, wide, n);
  } else if (std::is_floating_point_v<T> && (by & (by - 1)) == 0) {
    const T factor = static_cast<T>(1) / static_cast<T>(by);  // exact: the same bits as dividing
    for (int64_t i = 0; i < n; ++i) values[i] = static_cast<T>(values[i] * factor);
  } else {
    using Divisor = std::conditional_t<std::is_integral_v<T>, int, T>;
    for (int64_t i = 0; i < n; ++i)
      values[i] = static_cast<T>(values[i] / static_cast<Divisor>(by));
  }
}

// The block [at, at + n) of the tree over sources[0 .. count): the sum itself, or `scratch` that
// holds it. A subtree of m sources uses ceil(log2 m) blocks of scratch.
template <Combine C, class T>
const T* tree(const T* const* sources, int count, int64_t at, int64_t n, T* scratch) {
  if (count == 1) return sources[0] + at;
  int left_count = 1;
  while (2 * left_count < count) left_count *= 2;
  const T* left = tree<C>(sources, left_count, at, n, scratch);
  const T* right = tree<C>(sources + left_count, count - left_count, at, n,
                           left == scratch ? scratch + kBlock : scratch);
  combine_block<C>(scratch, left, right, n);
  return scratch;
}

// Two ranks of one type, the common case: one pass, nothing in between.
template <class T>
void sum_of_two(const T* a, const T* b, T* const* targets, int target_count, int64_t count,
                T factor) {
  T* first = targets[0];
  if (target_count == 2) {
    T* second = targets[1];
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      const T sum = (a[i] + b[i]) * factor;
      first[i] = sum;
      second[i] = sum;
    }
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) first[i] = (a[i] + b[i]) * factor;
  }
}

template <Combine C, class T>
void run(int divide_by, const T* const* sources, int source_count, T* const* targets,
         int target_count, int64_t count) {
  if constexpr (C == Combine::Sum && std::is_floating_point_v<T>) {
    // A factor that is a power of two is exact: the same bits as dividing.
    if (source_count == 2 && target_count <= 2 && (divide_by & (divide_by - 1)) == 0) {
      return sum_of_two(sources[0], sources[1], targets, target_count, count,
                        T(1) / static_cast<T>(divide_by));
    }
  }
  constexpr int kDepth = 12;  // 4096 ranks
  alignas(64) T scratch[kDepth * kBlock];
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t n = std::min(kBlock, count - at);
    const T* result = tree<C>(sources, source_count, at, n, scratch);
    if (divide_by != 1) {
      if (result != scratch) std::memcpy(scratch, result, n * sizeof(T));
      divide_block(scratch, n, divide_by);
      result = scratch;
    }
    for (int t = 0; t < target_count; ++t) {
      if (targets[t] + at != result) std::memcpy(targets[t] + at, result, n * sizeof(T));
    }
  }
}

template <class T>
void choose(const Reduction& r, const void* const* sources, int source_count, void* const* targets,
            int target_count, int64_t count) {
  const auto from = reinterpret_cast<const T* const*>(sources);
  const auto to = reinterpret_cast<T* const*>(targets);
  const auto run_as = [&]<Combine C>(std::integral_constant<Combine, C>) {
    run<C>(r.divide_by, from, source_count, to, target_count, count);
  };
#define LOCKSTEP_RUN(combine) run_as(std::integral_constant<Combine, Combine::combine>{})
  if constexpr (is_complex<T>) {
    return LOCKSTEP_RUN(Product);
  } else {
    // Group has refused all other dtypes.
    if constexpr (std::is_integral_v<T>) {
      if (r.combine == Combine::And) return LOCKSTEP_RUN(And);
      if (r.combine == Combine::Or) return LOCKSTEP_RUN(Or);
      if (r.combine == Combine::Xor) return LOCKSTEP_RUN(Xor);
    }
    if (r.combine == Combine::Min) return LOCKSTEP_RUN(Min);
    if (r.combine == Combine::Max) return LOCKSTEP_RUN(Max);
    if (r.combine == Combine::Product) return LOCKSTEP_RUN(Product);
    return LOCKSTEP_RUN(Sum);
  }
#undef LOCKSTEP_RUN
}

}  // namespace

void reduce(const Reduction& r, const void* const* sources, int source_count, void* const* targets,
            int target_count, int64_t count) {
  switch (r.element) {
    case Element::Float32:
      return choose<float>(r, sources, source_count, targets, target_count, count);
    case Element::Float64:
      return choose<double>(r, sources, source_count, targets, target_count, count);
    case Element::Float16:
      return choose<Half>(r, sources, source_count, targets, target_count, count);
    case Element::BFloat16:
      return choose<Brain>(r, sources, source_count, targets, target_count, count);
    case Element::Int8:
      return choose<int8_t>(r, sources, source_count, targets, target_count, count);
    case Element::Int16:
      return choose<int16_t>(r, sources, source_count, targets, target_count, count);
    case Element::Int32:
      return choose<int32_t>(r, sources, source_count, targets, target_count, count);
    case Element::Int64:
      return choose<int64_t>(r, sources, source_count, targets, target_count, count);
    case Element::Bool:  // stored as 0 or 1; the caller maps its operations to Or and And
    case Element::UInt8:
      return choose<uint8_t>(r, sources, source_count, targets, target_count, count);
    case Element::UInt16:
      return choose<uint16_t>(r, sources, source_count, targets, target_count, count);
    case Element::UInt32:
      return choose<uint32_t>(r, sources, source_count, targets, target_count, count);
    case Element::UInt64:
      return choose<uint64_t>(r, sources, source_count, targets, target_count, count);
    case Element::Float8E4M3:
      return choose<E4M3>(r, sources, source_count, targets, target_count, count);
    case Element::Float8E5M2:
      return choose<E5M2>(r, sources, source_count, targets, target_count, count);
    case Element::Complex64:
      return choose<Complex<float>>(r, sources, source_count, targets, target_count, count);
    case Element::Complex128:
      return choose<Complex<double>>(r, sources, source_count, targets, target_count, count);
  }
}

}  // namespace lockstep::comm::LOCKSTEP_ISA
