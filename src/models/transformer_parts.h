// What a block of a Transformer is made of.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <optional>

#include "lockstep/models/transformer.h"

namespace lockstep::models {

class TransformerAttentionImpl : public torch::nn::Cloneable<TransformerAttentionImpl> {
 public:
  explicit TransformerAttentionImpl(const TransformerOptions& options);
  // `cache` may be null.
  at::Tensor attend(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines,
                    KvCache* cache, int64_t layer);
  void reset() override;

  torch::nn::Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};
  RmsNorm q_norm{nullptr}, k_norm{nullptr};

 private:
  at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const std::optional<at::Tensor>& mask, bool causal) const;

  TransformerOptions options_;
};

class TransformerMlpImpl : public torch::nn::Cloneable<TransformerMlpImpl> {
 public:
  explicit TransformerMlpImpl(const TransformerOptions& options);
  at::Tensor forward(const at::Tensor& x);
  void reset() override;

  torch::nn::Linear gate_proj{nullptr}, up_proj{nullptr}, down_proj{nullptr};
  Swiglu activation{nullptr};

 private:
  TransformerOptions options_;
};

}  // namespace lockstep::models
