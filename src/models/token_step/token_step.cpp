#include "models/token_step/token_step.h"

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "lockstep/parallel/call.h"
#include "models/token_step/kernels.h"
#include "models/transformer_parts.h"

namespace lockstep::models {
namespace {

// Up to this many vectors a product of ours is faster than a matrix product of libtorch's.
constexpr int64_t kFew = 8;
// Multiplications for which a further thread is worth its begin and end.
constexpr int64_t kGrain = 32768;

bool is_off() { return at::GradMode::is_enabled() || at::autocast::is_autocast_enabled(at::kCPU); }

bool is_plain(const at::Tensor& tensor, at::IntArrayRef sizes) {
  return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided &&
         tensor.scalar_type() == at::kFloat && tensor.is_contiguous() && tensor.sizes() == sizes;
}

void multiply(const Product& p, int64_t rows) {
  const auto& kernels = token_kernels();
  if (p.count <= kFew) {
    const int64_t grain = std::max<int64_t>(8, kGrain / (p.columns * p.count) / 8 * 8);
    at::parallel_for(0, rows, grain,
                     [&](int64_t begin, int64_t end) { kernels.product(p, begin, end); });
    return;
  }
  const auto view = [](const float* data, int64_t a, int64_t b) {
    return at::from_blob(const_cast<float*>(data), {a, b}, at::kFloat);
  };
  at::Tensor y = view(p.y, p.count, p.stride);
  at::mm_out(y, view(p.x, p.count, p.columns), view(p.weight, rows, p.columns).t());
}

void add(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

}  // namespace

const TokenKernels& token_kernels() {
#ifdef __x86_64__
  static const bool suits = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (suits) return avx2::kTokenKernels;
#endif
  return baseline::kTokenKernels;
}

std::optional<at::Tensor> few_products(const at::Tensor& x, const at::Tensor& weight) {
  if (is_off() || x.dim() < 1 || weight.dim() != 2 || !is_plain(x, x.sizes()) ||
      !is_plain(weight, {weight.size(0), x.size(-1)}) || x.numel() == 0) {
    return std::nullopt;
  }
  const int64_t columns = x.size(-1), count = x.numel() / columns, rows = weight.size(0);
  if (count > kFew) return std::nullopt;
  auto sizes = x.sizes().vec();
  sizes.back() = rows;
  at::Tensor y = at::empty(sizes, x.options().requires_grad(false));
  multiply({weight.const_data_ptr<float>(), columns, x.const_data_ptr<float>(), count,
            y.mutable_data_ptr<float>(), rows},
           rows);
  return y;
}

// Of one step; each row is a sequence's.
struct TokenStep::Memory {
  Memory(const TransformerOptions& o, int64_t n, int64_t longest) {
    const std::array<std::pair<float**, int64_t>, 10> parts = {{
        {&x, o.hidden},
        {&normed, o.hidden},
        {&queries, o.heads * o.head_dim},
        {&keys, o.kv_heads * o.head_dim},
        {&values, o.kv_heads * o.head_dim},
        {&mixed, o.heads * o.head_dim},
        {&gate, o.feed_forward},
        {&up, o.feed_forward},
        {&scores, o.heads * longest},
        {&turns, o.head_dim},
    }};
    int64_t count = 0;
    for (const auto& part : parts) count += n * part.second;
    all = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(count));
    float* next = all.get();
    for (const auto& [place, size] : parts) {
      *place = next;
      next += n * size;
    }
  }

  std::unique_ptr<float[]> all;
  float *x, *normed, *queries, *keys, *values, *mixed, *gate, *up, *scores;
  float* turns;  // cosines, then sines, of each angle
};

TokenStep::TokenStep(const TransformerImpl& net, const at::Tensor& ids, KvCache& cache)
    : o_(net.options), body_(*net.model), ids_(ids), cache_(cache), n_(ids.size(0)) {}

std::optional<TokenStep> TokenStep::of(const TransformerImpl& net, const at::Tensor& ids,
                                       KvCache& cache) {
  const auto& o = net.options;
  if (is_off() || ids.size(1) != 1 || !ids.is_cpu() || !ids.is_contiguous() || ids.size(0) == 0 ||
      ids.size(0) != cache.sequences() || (o.dropout > 0 && net.is_training()) ||
      static_cast<int64_t>(cache.frequencies().size()) != o.head_dim / 2 ||
      parallel::detail::attachment_count.load(std::memory_order_acquire) > 0) {
    return std::nullopt;
  }
  const auto* id = ids.const_data_ptr<int64_t>();
  if (!std::all_of(id, id + ids.size(0), [&](int64_t i) { return i >= 0 && i < o.vocabulary; })) {
    return std::nullopt;
  }
  TokenStep step(net, ids, cache);
  if (!step.find_weights()) return std::nullopt;
  return step;
}

bool TokenStep::find_weights() {
  bool found = true;
  const auto plain = [&](const at::Tensor& tensor, at::IntArrayRef sizes) -> const float* {
    found = found && is_plain(tensor, sizes);
    return found ? tensor.const_data_ptr<float>() : nullptr;
  };
  const auto linear = [&](const torch::nn::Linear& layer, int64_t out, int64_t in) {
    found = found && !layer->bias.defined();
    return plain(layer->weight, {out, in});
  };
  const int64_t heads = o_.heads * o_.head_dim, kv_heads = o_.kv_heads * o_.head_dim;
  embedding_ = plain(body_.embed_tokens->weight, {o_.vocabulary, o_.hidden});
  norm_ = plain(body_.norm->weight, {o_.hidden});
  for (int64_t i = 0; i < o_.layers && found; ++i) {
    const auto block = body_.block(static_cast<size_t>(i));
    const auto& attention = *block->self_attn_;
    const auto& mlp = *block->mlp_;
    layers_.push_back({
        .input_norm = plain(block->input_layernorm_->weight, {o_.hidden}),
        .q = linear(attention.q_proj, heads, o_.hidden),
        .k = linear(attention.k_proj, kv_heads, o_.hidden),
        .v = linear(attention.v_proj, kv_heads, o_.hidden),
        .q_norm = plain(attention.q_norm->weight, {o_.head_dim}),
        .k_norm = plain(attention.k_norm->weight, {o_.head_dim}),
        .o = linear(attention.o_proj, o_.hidden, heads),
        .feed_forward_norm = plain(block->post_attention_layernorm_->weight, {o_.hidden}),
        .gate = linear(mlp.gate_proj, o_.feed_forward, o_.hidden),
        .up = linear(mlp.up_proj, o_.feed_forward, o_.hidden),
        .down = linear(mlp.down_proj, o_.hidden, o_.feed_forward),
    });
    const auto& kept = cache_.memory(i);
    for (const at::Tensor& tensor : {kept.keys, kept.values})
      plain(tensor, {n_, o_.kv_heads, cache_.capacity(), o_.head_dim});
  }
  return found;
}

at::Tensor TokenStep::run() {
  cache_.check_room(1);
  const auto& lengths = cache_.lengths();
  Memory m(o_, n_, *std::max_element(lengths.begin(), lengths.end()) + 1);
  const auto* ids = ids_.const_data_ptr<int64_t>();
  const auto& frequencies = cache_.frequencies();
  const int64_t half = o_.head_dim / 2;
  for (int64_t s = 0; s < n_; ++s) {
    std::memcpy(m.x + s * o_.hidden, embedding_ + ids[s] * o_.hidden,
                static_cast<size_t>(o_.hidden) * sizeof(float));
    float* turns = m.turns + s * o_.head_dim;
    for (int64_t i = 0; i < half; ++i) {
      const float angle =
          static_cast<float>(lengths[static_cast<size_t>(s)]) * frequencies[static_cast<size_t>(i)];
      turns[i] = std::cos(angle);
      turns[half + i] = std::sin(angle);
    }
  }
  for (int64_t i = 0; i < o_.layers; ++i) {
    const Layer& layer = layers_[static_cast<size_t>(i)];
    attend(layer, cache_.memory(i), m);
    feed_forward(layer, m);
  }
  at::Tensor out = at::empty({n_, 1, o_.hidden}, at::kFloat);
  normalise(m.x, norm_, o_.hidden, out.mutable_data_ptr<float>());
  cache_.advance(1);
  return out;
}

// All sequences' rows.
void TokenStep::normalise(const float* x, const float* weight, int64_t size, float* y) const {
  for (int64_t s = 0; s < n_; ++s) {
    token_kernels().normalise(
        {x + s * size, weight, size, static_cast<float>(o_.norm_eps), y + s * size});
  }
}

// Both halves of the head as one complex number, turned by its angle.
void TokenStep::rotate(float* head, int64_t sequence, const Memory& m) const {
  const int64_t half = o_.head_dim / 2;
  const float* cosines = m.turns + sequence * o_.head_dim;
  const float* sines = cosines + half;
  for (int64_t i = 0; i < half; ++i) {
    const float real = head[i], imaginary = head[half + i];
    head[i] = real * cosines[i] - imaginary * sines[i];
    head[half + i] = imaginary * cosines[i] + real * sines[i];
  }
}

void TokenStep::attend(const Layer& layer, KvCache::Layer& kept, Memory& m) const {
  const auto& kernels = token_kernels();
  const int64_t d = o_.head_dim, heads = o_.heads * d, kv_heads = o_.kv_heads * d;
  const int64_t group = o_.heads / o_.kv_heads, capacity = cache_.capacity();
  const auto& lengths = cache_.lengths();
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end()) + 1;
  const auto eps = static_cast<float>(o_.norm_eps);
  normalise(m.x, layer.input_norm, o_.hidden, m.normed);
  multiply({layer.q, o_.hidden, m.normed, n_, m.queries, heads}, heads);
  multiply({layer.k, o_.hidden, m.normed, n_, m.keys, kv_heads}, kv_heads);
  multiply({layer.v, o_.hidden, m.normed, n_, m.values, kv_heads}, kv_heads);
  auto* all_keys = kept.keys.mutable_data_ptr<float>();
  auto* all_values = kept.values.mutable_data_ptr<float>();
  // Each sequence's heads of keys, with the heads of queries that look at them.
  const auto one = [&](int64_t s, int64_t h) {
    const int64_t before = lengths[static_cast<size_t>(s)];
    float* keys = all_keys + (s * o_.kv_heads + h) * capacity * d;
    float* values = all_values + (s * o_.kv_heads + h) * capacity * d;
    float* key = keys + before * d;
    kernels.normalise({m.keys + s * kv_heads + h * d, layer.k_norm, d, eps, key});
    rotate(key, s, m);
    std::memcpy(values + before * d, m.values + s * kv_heads + h * d,
                static_cast<size_t>(d) * sizeof(float));
    float* queries = m.queries + s * heads + h * group * d;
    for (int64_t g = 0; g < group; ++g) {
      kernels.normalise({queries + g * d, layer.q_norm, d, eps, queries + g * d});
      rotate(queries + g * d, s, m);
    }
    kernels.attend({queries, keys, values, group, before + 1, d,
                    m.scores + (s * o_.heads + h * group) * longest,
                    m.mixed + s * heads + h * group * d});
  };
  at::parallel_for(0, n_ * o_.kv_heads, std::max<int64_t>(1, kGrain / (2 * group * longest * d)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin; i < end; ++i) one(i / o_.kv_heads, i % o_.kv_heads);
                   });
  multiply({layer.o, heads, m.mixed, n_, m.normed, o_.hidden}, o_.hidden);
  add(m.normed, n_ * o_.hidden, m.x);
}

void TokenStep::feed_forward(const Layer& layer, Memory& m) const {
  normalise(m.x, layer.feed_forward_norm, o_.hidden, m.normed);
  multiply({layer.gate, o_.hidden, m.normed, n_, m.gate, o_.feed_forward}, o_.feed_forward);
  multiply({layer.up, o_.hidden, m.normed, n_, m.up, o_.feed_forward}, o_.feed_forward);
  token_kernels().swiglu(m.gate, m.up, n_ * o_.feed_forward);
  multiply({layer.down, o_.feed_forward, m.gate, n_, m.normed, o_.hidden}, o_.hidden);
  add(m.normed, n_ * o_.hidden, m.x);
}

}  // namespace lockstep::models
