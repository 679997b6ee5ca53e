// What computes one token of a transformer in float32. No torch: compiled for each instruction set.
#pragma once

#include <cstdint>

namespace lockstep::models {

// Rows of a matrix that are multiplied by `count` vectors of `columns` elements, which lie after
// one another: y[v * stride + r] is the product of row r and vector v. Rows [begin, end).
struct Product {
  const float* weight;
  int64_t columns;
  const float* x;
  int64_t count;
  float* y;
  int64_t stride;
};

// x / sqrt(mean(x^2) + eps) * weight.
struct Normalisation {
  const float* x;
  const float* weight;
  int64_t size;
  float eps;
  float* y;
};

// Queries of the heads that share keys and values: `heads` x `size` after one another, as y.
// `scores` has memory for heads x length.
struct Attention {
  const float* queries;
  const float* keys;    // length x size
  const float* values;  // length x size
  int64_t heads;
  int64_t length;
  int64_t size;
  float* scores;
  float* y;
};

struct TokenKernels {
  void (*product)(const Product&, int64_t begin, int64_t end);
  void (*normalise)(const Normalisation&);
  void (*attend)(const Attention&);
  // gate = silu(gate) * up.
  void (*swiglu)(float* gate, const float* up, int64_t count);
};

// Those for this processor.
const TokenKernels& token_kernels();

namespace baseline {
extern const TokenKernels kTokenKernels;
}
namespace avx2 {
extern const TokenKernels kTokenKernels;
}

}  // namespace lockstep::models
