#include <torch/torch.h>

#include "lockstep/parallel/call.h"
#include "models/transformer_parts.h"

namespace lockstep::models {

RmsNormImpl::RmsNormImpl(int64_t size, double eps) : size_(size), eps_(eps) {
  RmsNormImpl::reset();
}

void RmsNormImpl::reset() { weight = register_parameter("weight", torch::ones({size_})); }

at::Tensor RmsNormImpl::forward(const at::Tensor& x) {
  const bool narrow = x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
  const at::Tensor wide = narrow ? x.to(at::kFloat) : x;
  const at::Tensor scale = at::rsqrt(wide.square().mean(-1, true) + eps_);
  return weight * (wide * scale).to(x.scalar_type());
}

at::Tensor SwigluImpl::forward(const at::Tensor& gate, const at::Tensor& up) {
  return at::silu(gate) * up;
}

namespace {

torch::nn::Linear linear(int64_t in, int64_t out) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}

// Both halves of each head as one complex number, turned by its angle.
at::Tensor rotated(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines) {
  const int64_t half = x.size(-1) / 2;
  const at::Tensor turned = at::cat({-x.slice(-1, half), x.slice(-1, 0, half)}, -1);
  return x * cosines + turned * sines;
}

}  // namespace

TransformerAttentionImpl::TransformerAttentionImpl(const TransformerOptions& options)
    : options_(options) {
  TransformerAttentionImpl::reset();
}

void TransformerAttentionImpl::reset() {
  const auto& o = options_;
  q_proj = register_module("q_proj", linear(o.hidden, o.heads * o.head_dim));
  k_proj = register_module("k_proj", linear(o.hidden, o.kv_heads * o.head_dim));
  v_proj = register_module("v_proj", linear(o.hidden, o.kv_heads * o.head_dim));
  o_proj = register_module("o_proj", linear(o.heads * o.head_dim, o.hidden));
  q_norm = register_module("q_norm", RmsNorm(o.head_dim, o.norm_eps));
  k_norm = register_module("k_norm", RmsNorm(o.head_dim, o.norm_eps));
}

at::Tensor TransformerAttentionImpl::attend(const at::Tensor& x, const at::Tensor& cosines,
                                            const at::Tensor& sines, KvCache* cache,
                                            int64_t layer) {
  const int64_t n = x.size(0), length = x.size(1), d = options_.head_dim;
  at::Tensor q =
      parallel::call(q_norm, q_proj(x).view({n, length, options_.heads, d})).transpose(1, 2);
  at::Tensor k =
      parallel::call(k_norm, k_proj(x).view({n, length, options_.kv_heads, d})).transpose(1, 2);
  at::Tensor v = v_proj(x).view({n, length, options_.kv_heads, d}).transpose(1, 2);
  const at::Tensor c = cosines.to(q.scalar_type()).unsqueeze(1);
  const at::Tensor s = sines.to(q.scalar_type()).unsqueeze(1);
  q = rotated(q, c, s);
  k = rotated(k, c, s);
  std::optional<at::Tensor> mask;
  bool causal = length > 1;
  if (cache != nullptr) {
    at::Tensor seen = cache->mask(length);
    causal = !seen.defined() && length > 1;
    if (seen.defined()) mask = std::move(seen);
    const auto all = cache->extend(layer, k, v);
    k = all.keys;
    v = all.values;
  }
  const at::Tensor y = attention(q, k.to(q.scalar_type()), v.to(q.scalar_type()), mask, causal);
  return o_proj(y.transpose(1, 2).reshape({n, length, options_.heads * d}));
}

at::Tensor TransformerAttentionImpl::attention(const at::Tensor& q, const at::Tensor& k,
                                               const at::Tensor& v,
                                               const std::optional<at::Tensor>& mask,
                                               bool causal) const {
  return at::scaled_dot_product_attention(q, k, v, mask, 0.0, causal, std::nullopt,
                                          options_.heads != options_.kv_heads);
}

TransformerMlpImpl::TransformerMlpImpl(const TransformerOptions& options) : options_(options) {
  TransformerMlpImpl::reset();
}

void TransformerMlpImpl::reset() {
  gate_proj = register_module("gate_proj", linear(options_.hidden, options_.feed_forward));
  up_proj = register_module("up_proj", linear(options_.hidden, options_.feed_forward));
  down_proj = register_module("down_proj", linear(options_.feed_forward, options_.hidden));
  activation = register_module("activation", Swiglu());
}

at::Tensor TransformerMlpImpl::forward(const at::Tensor& x) {
  return down_proj(parallel::call(activation, gate_proj(x), up_proj(x)));
}

TransformerBlockImpl::TransformerBlockImpl(const TransformerOptions& options) : options_(options) {
  TransformerBlockImpl::reset();
}

TransformerBlockImpl::~TransformerBlockImpl() = default;

void TransformerBlockImpl::reset() {
  self_attn_ = register_module("self_attn", std::make_shared<TransformerAttentionImpl>(options_));
  mlp_ = register_module("mlp", std::make_shared<TransformerMlpImpl>(options_));
  input_layernorm_ =
      register_module("input_layernorm", RmsNorm(options_.hidden, options_.norm_eps));
  post_attention_layernorm_ =
      register_module("post_attention_layernorm", RmsNorm(options_.hidden, options_.norm_eps));
}

at::Tensor TransformerBlockImpl::drop(const at::Tensor& x) const {
  return options_.dropout > 0 ? at::dropout(x, options_.dropout, is_training()) : x;
}

at::Tensor TransformerBlockImpl::add_feed_forward(const at::Tensor& x) {
  return x + drop(mlp_->forward(parallel::call(post_attention_layernorm_, x)));
}

at::Tensor TransformerBlockImpl::forward(const at::Tensor& x, const at::Tensor& cosines,
                                         const at::Tensor& sines) {
  const at::Tensor y = parallel::call(input_layernorm_, x);
  return add_feed_forward(x + drop(self_attn_->attend(y, cosines, sines, nullptr, 0)));
}

at::Tensor TransformerBlockImpl::forward(const at::Tensor& x, const at::Tensor& cosines,
                                         const at::Tensor& sines, KvCache& cache, int64_t layer) {
  const at::Tensor y = parallel::call(input_layernorm_, x);
  return add_feed_forward(x + drop(self_attn_->attend(y, cosines, sines, &cache, layer)));
}

}  // namespace lockstep::models
