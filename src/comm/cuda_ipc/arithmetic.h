// Elements and their arithmetic, to the bit those of comm/reduce/kernels.inl, for the kernels: as
// kernels.cu, compiled by NVRTC and, with __device__ defined, by the host's compiler.
#pragma once

#include "comm/cuda_ipc/calls.h"

namespace lockstep::comm::cuda_ipc {

template <class A, class B>
__device__ A bits_as(const B& value) {
  static_assert(sizeof(A) == sizeof(B));
  union {
    B from;
    A to;
  } both{value};
  return both.to;
}

// Floats of 16 and 8 bits are combined in float32 and rounded to nearest even.
struct Half {
  unsigned short bits;
};
struct Brain {
  unsigned short bits;
};
struct E4M3 {
  unsigned char bits;
};
struct E5M2 {
  unsigned char bits;
};
template <class Part>
struct Complex {
  Part real, imaginary;
};

__device__ inline float widen(Half value) {
  const U32 sign = (value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
  if (rest >= 0x7c00) return bits_as<float>(sign | 0x7f800000u | (rest & 0x3ff) << 13);
  // By a power of two, which is exact: 2^112.
  const float scaled = bits_as<float>(rest << 13) * bits_as<float>(0x77800000u);
  return bits_as<float>(sign | bits_as<U32>(scaled));
}
__device__ inline float widen(Brain value) {
  return bits_as<float>(static_cast<U32>(value.bits) << 16);
}
__device__ inline float widen(E4M3 value) {
  const U32 sign = (value.bits & 0x80u) << 24, rest = value.bits & 0x7fu;
  if (rest == 0x7f) return bits_as<float>(sign | 0x7fc00000u);
  const float scaled = bits_as<float>(rest << 20) * bits_as<float>(0x7b800000u);  // 2^120
  return bits_as<float>(sign | bits_as<U32>(scaled));
}
// The upper byte of a half.
__device__ inline float widen(E5M2 value) {
  return widen(Half{static_cast<unsigned short>(value.bits << 8)});
}

__device__ inline Half narrow(float value, Half) {
  const U32 bits = bits_as<U32>(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  U32 result = rest - 0x38000000 + 0xfff + (rest >> 13 & 1);
  result >>= 13;
  if (rest > 0x7f800000) {
    result = 0x7e00;
  } else if (rest >= 0x477ff000) {
    result = 0x7c00;
  } else if (rest < 0x38800000) {  // adding 0.5 leaves the rounded value in the last bits
    result = bits_as<U32>(bits_as<float>(rest) + 0.5f) - 0x3f000000;
  }
  return {static_cast<unsigned short>(sign | result)};
}
__device__ inline Brain narrow(float value, Brain) {
  const U32 bits = bits_as<U32>(value);
  const U32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return {static_cast<unsigned short>(value != value ? 0x7fc0 : rounded)};
}

template <int mantissa_bits, int bias>
__device__ U32 rounded_to_byte(U32 rest) {
  constexpr U32 kDropped = 23 - mantissa_bits;
  constexpr U32 kLeast = static_cast<U32>(128 - bias) << 23;
  constexpr U32 kShift = static_cast<U32>(128 - bias + 23 - mantissa_bits) << 23;
  if (rest < kLeast) return bits_as<U32>(bits_as<float>(rest) + bits_as<float>(kShift)) - kShift;
  const U32 rebased = rest - (static_cast<U32>(127 - bias) << 23);
  return (rebased + (1u << (kDropped - 1)) - 1 + (rebased >> kDropped & 1)) >> kDropped;
}
__device__ inline E4M3 narrow(float value, E4M3) {
  const U32 bits = bits_as<U32>(value), rest = bits & 0x7fffffff;
  U32 result = 0x7f;
  if (rest <= 0x7f800000) result = rest >= 0x43e00000 ? 0x7e : rounded_to_byte<3, 7>(rest);
  if (rest <= 0x7f800000 && result > 0x7e) result = 0x7e;
  return {static_cast<unsigned char>((bits >> 24 & 0x80) | result)};
}
__device__ inline E5M2 narrow(float value, E5M2) {
  const U32 bits = bits_as<U32>(value), rest = bits & 0x7fffffff;
  U32 result = 0x7f;
  if (rest <= 0x7f800000) result = rest >= 0x47800000 ? 0x7c : rounded_to_byte<2, 15>(rest);
  return {static_cast<unsigned char>((bits >> 24 & 0x80) | result)};
}

// In the order of comm::Combine.
enum Operation : int { Sum, Min, Max, Product, And, Or, Xor };

// The type in which a whole number's sum and product wrap.
template <class T>
struct Wrapping {
  using type = U64;
  static constexpr bool is_whole = true;
};
template <>
struct Wrapping<float> {
  using type = float;
  static constexpr bool is_whole = false;
};
template <>
struct Wrapping<double> {
  using type = double;
  static constexpr bool is_whole = false;
};

template <int operation, class T>
__device__ T combine_plain(T a, T b) {
  using W = typename Wrapping<T>::type;
  if constexpr (operation == Sum) {
    return static_cast<T>(static_cast<W>(a) + static_cast<W>(b));
  } else if constexpr (operation == Product) {
    return static_cast<T>(static_cast<W>(a) * static_cast<W>(b));
  } else if constexpr (operation == Min) {
    return a < b || a != a ? a : b;  // a NaN on either side wins
  } else if constexpr (operation == Max) {
    return a > b || a != a ? a : b;
  } else if constexpr (Wrapping<T>::is_whole && operation == And) {
    return static_cast<T>(a & b);
  } else if constexpr (Wrapping<T>::is_whole && operation == Or) {
    return static_cast<T>(a | b);
  } else if constexpr (Wrapping<T>::is_whole && operation == Xor) {
    return static_cast<T>(a ^ b);
  } else {
    return a;
  }
}

template <class T>
struct Arithmetic {
  template <int operation>
  static __device__ T combine(T a, T b) {
    return combine_plain<operation>(a, b);
  }
  static __device__ T divide(T value, int by) {
    if constexpr (Wrapping<T>::is_whole) return static_cast<T>(value / by);
    return static_cast<T>(value / static_cast<T>(by));
  }
};

template <class T>
struct Stored {
  template <int operation>
  static __device__ T combine(T a, T b) {
    return narrow(combine_plain<operation>(widen(a), widen(b)), T{});
  }
  static __device__ T divide(T value, int by) {
    return narrow(widen(value) / static_cast<float>(by), T{});
  }
};
template <>
struct Arithmetic<Half> : Stored<Half> {};
template <>
struct Arithmetic<Brain> : Stored<Brain> {};
template <>
struct Arithmetic<E4M3> : Stored<E4M3> {};
template <>
struct Arithmetic<E5M2> : Stored<E5M2> {};

// Products alone: a sum is one of the parts.
template <class Part>
struct Arithmetic<Complex<Part>> {
  template <int>
  static __device__ Complex<Part> combine(Complex<Part> a, Complex<Part> b) {
    return {a.real * b.real - a.imaginary * b.imaginary,
            a.real * b.imaginary + a.imaginary * b.real};
  }
  static __device__ Complex<Part> divide(Complex<Part> value, int) { return value; }
};

}  // namespace lockstep::comm::cuda_ipc
