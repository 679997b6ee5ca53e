// The kernels, included once per instruction set with LOCKSTEP_ISA naming the namespace.
#include <array>
#include <cmath>
#include <cstring>

#include "models/token_step/kernels.h"

namespace lockstep::models::LOCKSTEP_ISA {
namespace {

// No functions of the standard library but those that are always inlined: a linker keeps one copy
// of each for all instruction sets.

#ifdef __AVX2__
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));
using Ints = int32_t __attribute__((vector_size(kLanes * sizeof(float))));

inline Floats load(const float* from) {
  Floats out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

inline float sum_of(Floats x) {
  using Quad = float __attribute__((vector_size(16)));
#ifdef __AVX2__
  Quad sums = __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
#else
  Quad sums = x;
#endif
  sums += __builtin_shufflevector(sums, sums, 2, 3, 0, 1);
  return sums[0] + sums[1];
}

// With `ahead` the next rows are asked for in advance: of four streams the processor foresees too
// little (8.4 M elements and 4 vectors: 1.7 ms with it, 3.4 without).
template <int rows, int count, bool ahead>
void block(const Product& p, int64_t row, int64_t vector) {
  const float* weight = p.weight + row * p.columns;
  const float* x = p.x + vector * p.columns;
  std::array<std::array<Floats, count>, rows> sums = {};
  int64_t c = 0;
  for (; c + kLanes <= p.columns; c += kLanes) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const Floats w = load(weight + r * p.columns + c);
      if constexpr (ahead) __builtin_prefetch(weight + (r + rows) * p.columns + c);
#pragma GCC unroll 8
      for (int v = 0; v < count; ++v) sums[r][v] += w * load(x + v * p.columns + c);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < count; ++v) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) p.y[(vector + v) * p.stride + row + r] = sum_of(sums[r][v]);
  }
  if (c == p.columns) return;
  for (int v = 0; v < count; ++v) {
    for (int r = 0; r < rows; ++r) {
      float sum = 0;
      for (int64_t i = c; i < p.columns; ++i) {
        sum += weight[r * p.columns + i] * x[v * p.columns + i];
      }
      p.y[(vector + v) * p.stride + row + r] += sum;
    }
  }
}

template <int rows>
void blocks(const Product& p, int64_t row) {
  if (p.count == 1) return block<rows, 1, false>(p, row, 0);
  block<rows, 2, true>(p, row, 0);
  int64_t vector = 2;
  for (; vector + 2 <= p.count; vector += 2) block<rows, 2, false>(p, row, vector);
  if (vector < p.count) block<rows, 1, false>(p, row, vector);
}

void product(const Product& p, int64_t begin, int64_t end) {
  int64_t row = begin;
  if (p.count == 1) {
    for (; row + 8 <= end; row += 8) block<8, 1, false>(p, row, 0);
  }
  for (; row + 4 <= end; row += 4) blocks<4>(p, row);
  for (; row < end; ++row) blocks<1>(p, row);
}

void normalise(const Normalisation& n) {
  Floats squares = {};
  int64_t i = 0;
  for (; i + kLanes <= n.size; i += kLanes) squares += load(n.x + i) * load(n.x + i);
  float sum = sum_of(squares);
  for (int64_t rest = i; rest < n.size; ++rest) sum += n.x[rest] * n.x[rest];
  const float scale = 1.0F / std::sqrt(sum / static_cast<float>(n.size) + n.eps);
  for (i = 0; i < n.size; ++i) n.y[i] = n.weight[i] * (n.x[i] * scale);
}

// Within 2 units in the last place; NaN stays NaN (S. L. Moshier, "Cephes").
inline Floats exp_of(Floats x) {
  x = x > 88.0F ? Floats{} + 88.0F : x;
  x = x < -87.0F ? Floats{} - 87.0F : x;
  constexpr float kRounding = 12582912.0F;  // 1.5 * 2^23: what is added to it has no fraction left
  const Floats whole = (x * 1.44269504F + kRounding) - kRounding;
  const Floats r = (x - whole * 0.693359375F) + whole * 2.12194440e-4F;
  Floats y = r * 1.9875691500e-4F + 1.3981999507e-3F;
  y = y * r + 8.3334519073e-3F;
  y = y * r + 4.1665795894e-2F;
  y = y * r + 1.6666665459e-1F;
  y = y * r + 5.0000001201e-1F;
  y = y * r * r + r + 1.0F;
  const Ints power = (__builtin_convertvector(whole, Ints) + 127) << 23;
  Floats scale;
  std::memcpy(&scale, &power, sizeof scale);
  return y * scale;
}

// f of each of `count` elements.
template <class F>
void for_each(float* x, int64_t count, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(x + i, f(load(x + i)));
  if (i == count) return;
  std::array<float, kLanes> rest = {};
  for (int64_t k = i; k < count; ++k) rest[k - i] = x[k];
  store(rest.data(), f(load(rest.data())));
  for (int64_t k = i; k < count; ++k) x[k] = rest[k - i];
}

// The sum of values by their weights, of `vectors` vectors of elements from `first` on.
template <int vectors>
void weigh(const Attention& a, const float* weights, int64_t first, float* y) {
  std::array<Floats, vectors> sums = {};
  for (int64_t t = 0; t < a.length; ++t) {
    const float* value = a.values + t * a.size + first;
    for (int i = 0; i < vectors; ++i) sums[i] += weights[t] * load(value + i * kLanes);
  }
  for (int i = 0; i < vectors; ++i) store(y + first + i * kLanes, sums[i]);
}

void attend(const Attention& a) {
  product({a.keys, a.size, a.queries, a.heads, a.scores, a.length}, 0, a.length);
  const float scale = 1.0F / std::sqrt(static_cast<float>(a.size));
  for (int64_t head = 0; head < a.heads; ++head) {
    float* weights = a.scores + head * a.length;
    float* y = a.y + head * a.size;
    float most = weights[0], sum = 0;
    for (int64_t t = 1; t < a.length; ++t) most = weights[t] > most ? weights[t] : most;
    for_each(weights, a.length, [&](Floats score) { return exp_of((score - most) * scale); });
    for (int64_t t = 0; t < a.length; ++t) sum += weights[t];
    const float share = 1.0F / sum;
    int64_t i = 0;
    for (; i + 8 * kLanes <= a.size; i += 8 * kLanes) weigh<8>(a, weights, i, y);
    for (; i + 4 * kLanes <= a.size; i += 4 * kLanes) weigh<4>(a, weights, i, y);
    for (; i + kLanes <= a.size; i += kLanes) weigh<1>(a, weights, i, y);
    for (; i < a.size; ++i) {
      y[i] = 0;
      for (int64_t t = 0; t < a.length; ++t) y[i] += weights[t] * a.values[t * a.size + i];
    }
    for (i = 0; i < a.size; ++i) y[i] *= share;
  }
}

void swiglu(float* gate, const float* up, int64_t count) {
  for_each(gate, count, [](Floats x) { return x / (1.0F + exp_of(-x)); });
  for (int64_t i = 0; i < count; ++i) gate[i] *= up[i];
}

}  // namespace

const TokenKernels kTokenKernels = {product, normalise, attend, swiglu};

}  // namespace lockstep::models::LOCKSTEP_ISA
