// The reduction, included once per instruction set with LOCKSTEP_ISA naming the namespace.
// Blocks of kBlock elements stay in the first-level cache while the tree over the ranks is walked.
#include <algorithm>
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

// 16-bit floats are storage only: blocks are widened, combined in float32 and rounded back to
// nearest even.
struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};

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
  else
    return a;  // bitwise on floats: refused by Group
}

// to = a + b, all of length n; `to` may be a or b.
template <Combine C, class T>
void combine_block(T* to, const T* a, const T* b, int64_t n) {
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, Brain>) {
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
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, Brain>) {
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
  switch (r.combine) {
    case Combine::Sum:
      return run<Combine::Sum>(r.divide_by, from, source_count, to, target_count, count);
    case Combine::Min:
      return run<Combine::Min>(r.divide_by, from, source_count, to, target_count, count);
    case Combine::Max:
      return run<Combine::Max>(r.divide_by, from, source_count, to, target_count, count);
    case Combine::Product:
      return run<Combine::Product>(r.divide_by, from, source_count, to, target_count, count);
    case Combine::And:
      return run<Combine::And>(r.divide_by, from, source_count, to, target_count, count);
    case Combine::Or:
      return run<Combine::Or>(r.divide_by, from, source_count, to, target_count, count);
  }
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
  }
}

}  // namespace lockstep::comm::LOCKSTEP_ISA
