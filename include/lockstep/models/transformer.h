// The decoder-only transformer in Qwen 3's layout (Yang et al., "Qwen3 Technical Report", 2025):
// RMSNorm before attention and feed-forward, grouped-query attention with normalised queries and
// keys, rotary positions, SwiGLU, no bias.
//
//   lockstep::models::Transformer net(
//       {.vocabulary = tokenizer.size(), .layers = 6, .hidden = 384});
//   at::Tensor loss = lockstep::call(net, ids, targets);
//
// Names of parameters are those of transformers' Qwen3ForCausalLM. lockstep/models/pretrained.h
// reads and writes its folders, lockstep/models/generate.h generates text with it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <vector>

#include "lockstep/models/holder.h"
#include "lockstep/models/kv_cache.h"

namespace lockstep::models {

// Sizes of a Transformer. In brackets the names in a config.json.
struct TransformerOptions {
  int64_t vocabulary = 0;           // rows of the embedding [vocab_size]
  int64_t layers = 4;               // [num_hidden_layers]
  int64_t hidden = 256;             // width [hidden_size]
  int64_t feed_forward = 0;         // width within; 0: 3 x hidden [intermediate_size]
  int64_t heads = 4;                // of queries [num_attention_heads]
  int64_t kv_heads = 0;             // of keys and values; 0: as many [num_key_value_heads]
  int64_t head_dim = 0;             // 0: hidden / heads [head_dim]
  int64_t max_length = 1024;        // tokens of a sequence [max_position_embeddings]
  bool tied = true;                 // the embedding is the head's weight, too [tie_word_embeddings]
  double rope_theta = 1e6;          // [rope_theta]
  double norm_eps = 1e-6;           // [rms_norm_eps]
  double initial_deviation = 0.02;  // of the initial weights [initializer_range]
  double dropout = 0;  // of what attention and feed-forward add, in training; Qwen has none

  bool operator==(const TransformerOptions&) const = default;
};

// How many parameters it has; a tied head's are counted once.
int64_t parameter_count(const TransformerOptions& options);

// x / sqrt(mean(x^2) + eps), computed in float32 or wider, times the weight.
class RmsNormImpl : public torch::nn::Cloneable<RmsNormImpl> {
 public:
  // `size` is that of the last dimension.
  RmsNormImpl(int64_t size, double eps);
  // Returns a tensor of x's shape; of its dtype, or the weight's where that is wider.
  at::Tensor forward(const at::Tensor& x);
  void reset() override;

  at::Tensor weight;

 private:
  int64_t size_;
  double eps_;
};
TORCH_MODULE(RmsNorm);

// silu(gate) * up.
class SwigluImpl : public torch::nn::Cloneable<SwigluImpl> {
 public:
  // `gate` and `up` have one shape.
  at::Tensor forward(const at::Tensor& gate, const at::Tensor& up);
  void reset() override {}
};
TORCH_MODULE(Swiglu);

class TransformerAttentionImpl;
class TransformerMlpImpl;
class TokenStep;

// One layer: attention, then the feed-forward network, each added to its input.
class TransformerBlockImpl : public torch::nn::Cloneable<TransformerBlockImpl> {
 public:
  // Options as Transformer has completed them.
  explicit TransformerBlockImpl(const TransformerOptions& options);
  ~TransformerBlockImpl() override;

  // x: batch x length x hidden; cosines and sines: 1 or batch x length x head_dim.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines);
  // As above, after the tokens in the cache, to which x's are added.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines,
                     KvCache& cache, int64_t layer);
  void reset() override;

 private:
  friend class TransformerImpl;
  friend class TokenStep;
  at::Tensor add_feed_forward(const at::Tensor& x);
  at::Tensor drop(const at::Tensor& x) const;

  TransformerOptions options_;
  RmsNorm input_layernorm_{nullptr}, post_attention_layernorm_{nullptr};
  std::shared_ptr<TransformerAttentionImpl> self_attn_;
  std::shared_ptr<TransformerMlpImpl> mlp_;
};
TORCH_MODULE(TransformerBlock);

// All layers but the head.
class TransformerBodyImpl : public torch::nn::Cloneable<TransformerBodyImpl> {
 public:
  // Options as Transformer has completed them.
  explicit TransformerBodyImpl(const TransformerOptions& options);
  void reset() override;

  // The layer of this number.
  std::shared_ptr<TransformerBlockImpl> block(size_t number) const;

  torch::nn::Embedding embed_tokens{nullptr};
  torch::nn::ModuleList layers{nullptr};  // of TransformerBlock
  RmsNorm norm{nullptr};

 private:
  TransformerOptions options_;
};
TORCH_MODULE(TransformerBody);

// Which modules recompute their activations in backward instead of keeping them
// (lockstep/parallel/activation_checkpointing.h): norms and activations, which cost little, or
// whole blocks, which keep least.
enum class Recomputed { Selective, Full };

// Blocks are called through lockstep::call(), so that Fsdp and ActivationCheckpointing work on
// them.
class TransformerImpl : public torch::nn::Cloneable<TransformerImpl> {
 public:
  // Draws the initial values from the default generator: normal with `initial_deviation`, norms 1.
  // Throws ConfigError for impossible sizes.
  explicit TransformerImpl(const TransformerOptions& options);

  // Logits, batch x length x vocabulary, of ids, batch x length (int64). Throws ConfigError when
  // they are longer than max_length.
  at::Tensor forward(const at::Tensor& ids);

  // The mean loss of targets, batch x length (int64; those of -100 do not count): the token after
  // each id. Never holds all logits (lockstep/models/cross_entropy.h).
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& targets);

  // What the head multiplies: batch x length x hidden, normalised.
  at::Tensor hidden(const at::Tensor& ids);

  // As above, for ids that follow those in the cache, to which they are added; each sequence has
  // its own length there. One token a sequence has a way of its own on the CPU in float32, without
  // gradients: the same values up to rounding, without libtorch's operators. Throws ConfigError for
  // another number of sequences than the cache has, and when it is full; the positions may go
  // beyond max_length, as the cache may.
  at::Tensor hidden(const at::Tensor& ids, KvCache& cache);

  // Logits of hidden(): ... x vocabulary.
  at::Tensor head(const at::Tensor& hidden) const;
  // Its weight, vocabulary x hidden: the embedding's when they are tied.
  const at::Tensor& head_weight() const;

  // An empty cache for this many sequences of up to `length` tokens, of the parameters' dtype and
  // device.
  KvCache make_cache(int64_t sequences, int64_t length) const;

  // To be given to ActivationCheckpointing; of blocks every `every`-th.
  std::vector<std::shared_ptr<torch::nn::Module>> recomputed(Recomputed kind, int64_t every = 1);

  // Draws all parameters again.
  void reset_parameters();

  void reset() override;
  // "lockstep::models::Transformer(4 layers of 256, 4 heads, vocabulary 8192, 5.2 M parameters)"
  void pretty_print(std::ostream& stream) const override;

  // Every size given.
  TransformerOptions options;
  TransformerBody model{nullptr};
  torch::nn::Linear lm_head{nullptr};  // empty when it is tied

 private:
  struct Rotation {
    at::Tensor cosines, sines;
  };
  at::Tensor frequencies(at::Device device) const;
  Rotation rotation(const at::Tensor& positions, const at::Tensor& x) const;
  void check_ids(const at::Tensor& ids) const;
};

// What a program makes and keeps: Transformer({.vocabulary = 8192}).
using Transformer = Holder<TransformerImpl, TransformerOptions>;

}  // namespace lockstep::models
