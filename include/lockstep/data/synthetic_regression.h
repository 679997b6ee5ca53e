// A line with noise: the smallest thing one can train on.
#pragma once

#include <cstdint>

#include "lockstep/data/tensor_dataset.h"

namespace lockstep::data {

// The line, and its noise.
struct SyntheticRegressionOptions {
  double slope = 2.0;
  double intercept = 3.0;
  double noise = 0.1;  // standard deviation
  int64_t seed = 1;
};

// `size` samples y = slope * x + intercept + noise * n, x uniform in [-1, 1), n normal; both
// float32, size x 1. The same bits as Python's g = torch.Generator().manual_seed(seed); x =
// torch.rand(size, 1, generator=g) * 2 - 1; y = slope * x + intercept + noise * torch.randn(size,
// 1, generator=g). Throws ConfigError when size < 1 or noise < 0.
class SyntheticRegression : public TensorDataset {
 public:
  // Makes all samples.
  explicit SyntheticRegression(int64_t size, const SyntheticRegressionOptions& options = {});
};

}  // namespace lockstep::data
