#include "lockstep/models/transformer.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <ostream>

#include "comm/transport.h"
#include "core/counted.h"
#include "lockstep/core/error.h"
#include "lockstep/models/cross_entropy.h"
#include "lockstep/parallel/call.h"
#include "models/checks.h"
#include "models/token_step/token_step.h"
#include "models/transformer_parts.h"

namespace lockstep::models {
namespace {

TransformerOptions completed(TransformerOptions options) {
  const auto positive = [](std::string_view what, int64_t value) {
    check_positive("transformer", what, value);
  };
  positive("vocabulary", options.vocabulary);
  positive("layers", options.layers);
  positive("hidden", options.hidden);
  positive("heads", options.heads);
  positive("max_length", options.max_length);
  check_dropout("transformer", options.dropout);
  if (options.feed_forward == 0) options.feed_forward = 3 * options.hidden;
  if (options.kv_heads == 0) options.kv_heads = options.heads;
  if (options.head_dim == 0) {
    if (options.hidden % options.heads != 0) {
      throw ConfigError(
          fmt::format("[transformer] hidden = {} is not a multiple of heads = {}: give head_dim",
                      options.hidden, options.heads));
    }
    options.head_dim = options.hidden / options.heads;
  }
  positive("feed_forward", options.feed_forward);
  positive("kv_heads", options.kv_heads);
  if (options.heads % options.kv_heads != 0) {
    throw ConfigError(fmt::format("[transformer] heads = {} is not a multiple of kv_heads = {}",
                                  options.heads, options.kv_heads));
  }
  if (options.head_dim < 1 || options.head_dim % 2 != 0) {
    throw ConfigError(fmt::format(
        "[transformer] head_dim = {}: rotary positions need an even number", options.head_dim));
  }
  if (!(options.rope_theta > 0) || !(options.norm_eps > 0) || !(options.initial_deviation >= 0)) {
    throw ConfigError(fmt::format(
        "[transformer] rope_theta = {}, norm_eps = {} and initial_deviation = {} must be positive",
        options.rope_theta, options.norm_eps, options.initial_deviation));
  }
  return options;
}

}  // namespace

int64_t parameter_count(const TransformerOptions& given) {
  const auto o = completed(given);
  const int64_t attention = (2 * o.heads + 2 * o.kv_heads) * o.head_dim * o.hidden + 2 * o.head_dim;
  const int64_t block = attention + 3 * o.hidden * o.feed_forward + 2 * o.hidden;
  return o.layers * block + o.hidden + (o.tied ? 1 : 2) * o.vocabulary * o.hidden;
}

TransformerBodyImpl::TransformerBodyImpl(const TransformerOptions& options) : options_(options) {
  TransformerBodyImpl::reset();
}

void TransformerBodyImpl::reset() {
  embed_tokens =
      register_module("embed_tokens", torch::nn::Embedding(options_.vocabulary, options_.hidden));
  layers = register_module("layers", torch::nn::ModuleList());
  for (int64_t i = 0; i < options_.layers; ++i) layers->push_back(TransformerBlock(options_));
  norm = register_module("norm", RmsNorm(options_.hidden, options_.norm_eps));
}

std::shared_ptr<TransformerBlockImpl> TransformerBodyImpl::block(size_t number) const {
  return layers->ptr<TransformerBlockImpl>(number);
}

TransformerImpl::TransformerImpl(const TransformerOptions& options_)
    : options(completed(options_)) {
  TransformerImpl::reset();
  reset_parameters();
}

void TransformerImpl::reset() {
  model = register_module("model", TransformerBody(options));
  if (!options.tied) {
    lm_head = register_module(
        "lm_head", torch::nn::Linear(
                       torch::nn::LinearOptions(options.hidden, options.vocabulary).bias(false)));
  }
}

void TransformerImpl::reset_parameters() {
  const at::NoGradGuard no_grad;
  for (auto& parameter : parameters()) {
    if (parameter.dim() == 1) {
      parameter.fill_(1);
    } else {
      torch::nn::init::normal_(parameter, 0, options.initial_deviation);
    }
  }
}

void TransformerImpl::check_ids(const at::Tensor& ids) const {
  if (ids.dim() != 2 || ids.scalar_type() != at::kLong) {
    throw ConfigError(
        fmt::format("[transformer] forward: ids have {} dimensions and dtype {}; batch x length of "
                    "int64 is wanted",
                    ids.dim(), comm::name_of(ids.scalar_type())));
  }
  if (ids.size(1) > options.max_length) {
    throw ConfigError(fmt::format("[transformer] forward: {} tokens, max_length is {}", ids.size(1),
                                  options.max_length));
  }
}

at::Tensor TransformerImpl::frequencies(at::Device device) const {
  const auto wide = at::dtype(at::kFloat).device(device);
  const auto d = static_cast<double>(options.head_dim);
  return at::pow(at::scalar_tensor(options.rope_theta, wide),
                 at::arange(0, options.head_dim, 2, wide) / d)
      .reciprocal();
}

TransformerImpl::Rotation TransformerImpl::rotation(const at::Tensor& positions,
                                                    const at::Tensor& x) const {
  const at::Tensor angles = positions.to(at::kFloat).unsqueeze(-1) * frequencies(x.device());
  const at::Tensor both = at::cat({angles, angles}, -1);
  return {both.cos().to(x.scalar_type()), both.sin().to(x.scalar_type())};
}

at::Tensor TransformerImpl::hidden(const at::Tensor& ids) {
  check_ids(ids);
  at::Tensor x = model->embed_tokens(ids);
  const auto [cosines, sines] = rotation(at::arange(ids.size(1), ids.options()).unsqueeze(0), x);
  for (size_t i = 0; i < model->layers->size(); ++i) {
    x = parallel::call(model->block(i), x, cosines, sines);
  }
  return parallel::call(model->norm, x);
}

at::Tensor TransformerImpl::hidden(const at::Tensor& ids, KvCache& cache) {
  check_ids(ids);
  if (ids.size(0) != cache.sequences()) {
    throw ConfigError(fmt::format("[transformer] forward: ids of {} for a KvCache of {}",
                                  counted(ids.size(0), "sequence"), cache.sequences()));
  }
  if (auto step = TokenStep::of(*this, ids, cache)) return step->run();
  at::Tensor x = model->embed_tokens(ids);
  const auto [cosines, sines] = rotation(cache.positions(ids.size(1)), x);
  for (size_t i = 0; i < model->layers->size(); ++i) {
    x = parallel::call(model->block(i), x, cosines, sines, cache, static_cast<int64_t>(i));
  }
  cache.advance(ids.size(1));
  return parallel::call(model->norm, x);
}

const at::Tensor& TransformerImpl::head_weight() const {
  return options.tied ? model->embed_tokens->weight : lm_head->weight;
}

at::Tensor TransformerImpl::head(const at::Tensor& hidden) const {
  if (auto few = few_products(hidden, head_weight())) return *std::move(few);
  return at::linear(hidden, head_weight());
}

at::Tensor TransformerImpl::forward(const at::Tensor& ids) { return head(hidden(ids)); }

at::Tensor TransformerImpl::forward(const at::Tensor& ids, const at::Tensor& targets) {
  return cross_entropy(hidden(ids), head_weight(), targets);
}

KvCache TransformerImpl::make_cache(int64_t sequences, int64_t length) const {
  check_positive("transformer", "sequences of a KvCache", sequences);
  check_positive("transformer", "length of a KvCache", length);
  const auto& weight = model->embed_tokens->weight;
  std::vector<KvCache::Layer> layers;
  for (int64_t i = 0; i < options.layers; ++i) {
    const std::vector<int64_t> sizes{sequences, options.kv_heads, length, options.head_dim};
    layers.push_back({at::zeros(sizes, weight.options().requires_grad(false)),
                      at::zeros(sizes, weight.options().requires_grad(false))});
  }
  const at::Tensor angles = frequencies(at::kCPU).contiguous();
  const auto* first = angles.const_data_ptr<float>();
  return {std::move(layers), sequences, length, {first, first + angles.numel()}};
}

std::vector<std::shared_ptr<torch::nn::Module>> TransformerImpl::recomputed(Recomputed kind,
                                                                            int64_t every) {
  check_positive("transformer", "every", every);
  std::vector<std::shared_ptr<torch::nn::Module>> out;
  for (size_t i = 0; i < model->layers->size(); i += static_cast<size_t>(every)) {
    const auto block = model->block(i);
    if (kind == Recomputed::Full) {
      out.push_back(block);
      continue;
    }
    for (auto& norm : {block->input_layernorm_, block->post_attention_layernorm_,
                       block->self_attn_->q_norm, block->self_attn_->k_norm}) {
      out.push_back(norm.ptr());
    }
    out.push_back(block->mlp_->activation.ptr());
  }
  return out;
}

void TransformerImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format(
      "lockstep::models::Transformer({} layers of {}, {} heads, vocabulary {}, {:.1f} M "
      "parameters)",
      options.layers, options.hidden, options.heads, options.vocabulary,
      static_cast<double>(parameter_count(options)) / 1e6);
}

}  // namespace lockstep::models
