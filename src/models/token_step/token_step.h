// One token of each sequence through all layers without libtorch's operators, on the CPU in float32
// and without gradients. With one token an operator costs more than what it computes: a layer calls
// about 60 of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/models/transformer.h"

namespace lockstep::models {

// hidden() of ids of one column, up to rounding. Refers to what it was made of.
class TokenStep {
 public:
  // Nothing when this is not for it: several tokens a sequence, another device or dtype, gradients,
  // autocast, dropout, layers with something attached (Fsdp), numbers that are not tokens.
  static std::optional<TokenStep> of(const TransformerImpl& net, const at::Tensor& ids,
                                     KvCache& cache);
  // Throws ConfigError when the cache is full.
  at::Tensor run();

 private:
  struct Layer {
    const float *input_norm, *q, *k, *v, *q_norm, *k_norm, *o, *feed_forward_norm, *gate, *up,
        *down;
  };
  struct Memory;
  TokenStep(const TransformerImpl& net, const at::Tensor& ids, KvCache& cache);
  bool find_weights();
  void attend(const Layer& layer, KvCache::Layer& kept, Memory& m) const;
  void feed_forward(const Layer& layer, Memory& m) const;
  void rotate(float* head, int64_t sequence, const Memory& m) const;
  void normalise(const float* x, const float* weight, int64_t size, float* y) const;

  const TransformerOptions& o_;
  const TransformerBodyImpl& body_;
  const at::Tensor& ids_;
  KvCache& cache_;
  int64_t n_;
  std::vector<Layer> layers_;
  const float *embedding_ = nullptr, *norm_ = nullptr;
};

// at::linear() of few vectors, where nothing is needed that TokenStep does not have.
std::optional<at::Tensor> few_products(const at::Tensor& x, const at::Tensor& weight);

}  // namespace lockstep::models
