// The transformer of peers/transformer.py, operation for operation.
#pragma once

#include <lockstep/parallel/call.h>
#include <torch/torch.h>

#include <vector>

namespace bench {

namespace nn = torch::nn;
using torch::Tensor;

// What Python's Linear calls: torch::nn::Linear's own forward adds the bias in a pass of its own.
inline Tensor linear(const nn::Linear& layer, const Tensor& x) {
  return at::linear(x, layer->weight, layer->bias);
}

// Pre-norm: attention, then a GELU MLP four times as wide.
struct BlockImpl : nn::Module {
  BlockImpl(int64_t width, int64_t head_count)
      : heads(head_count),
        norm1(nn::LayerNormOptions({width})),
        norm2(nn::LayerNormOptions({width})),
        qkv(width, 3 * width),
        proj(width, width),
        up(width, 4 * width),
        down(4 * width, width) {
    register_module("norm1", norm1);
    register_module("norm2", norm2);
    register_module("qkv", qkv);
    register_module("proj", proj);
    register_module("up", up);
    register_module("down", down);
  }

  Tensor forward(const Tensor& x) {
    const auto b = x.size(0), t = x.size(1), c = x.size(2);
    const auto parts =
        linear(qkv, norm1(x)).view({b, t, 3, heads, c / heads}).permute({2, 0, 3, 1, 4}).unbind();
    const auto a =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    const auto y = x + linear(proj, a.transpose(1, 2).reshape({b, t, c}));
    return y + linear(down, at::gelu(linear(up, norm2(y))));
  }

  int64_t heads;
  nn::LayerNorm norm1, norm2;
  nn::Linear qkv, proj, up, down;
};
TORCH_MODULE(Block);

struct GptShape {
  int64_t layers = 4, width = 256, heads = 4, vocab = 4096, length = 128;
};
// GPT-2's smallest, but for a vocabulary that gives as many parameters without a tied head.
inline constexpr GptShape kGpt125M{
    .layers = 12, .width = 768, .heads = 12, .vocab = 25'088, .length = 1024};

// Learned positions, untied output head without bias.
struct GptImpl : nn::Module {
  explicit GptImpl(const GptShape& shape)
      : tokens(shape.vocab, shape.width),
        positions(shape.length, shape.width),
        norm(nn::LayerNormOptions({shape.width})),
        head(nn::LinearOptions(shape.width, shape.vocab).bias(false)) {
    register_module("tokens", tokens);
    register_module("positions", positions);
    for (int64_t i = 0; i < shape.layers; ++i) blocks->push_back(Block(shape.width, shape.heads));
    register_module("blocks", blocks);
    register_module("norm", norm);
    register_module("head", head);
    for (auto& parameter : parameters()) {
      if (parameter.dim() > 1) nn::init::normal_(parameter, 0, 0.02);
    }
  }

  Tensor forward(const Tensor& words) {
    Tensor x = tokens(words) + positions->weight.narrow(0, 0, words.size(1));
    for (const auto& block : *blocks) x = lockstep::call(*block->as<BlockImpl>(), x);
    return linear(head, norm(x));
  }

  nn::Embedding tokens, positions;
  nn::ModuleList blocks;
  nn::LayerNorm norm;
  nn::Linear head;
};
TORCH_MODULE(Gpt);

struct Batch {
  Tensor x, y;
};

// Batches of a noisy affine sequence, as the peer's synthetic(): t[i+1] = (5 t[i] + 7) mod vocab,
// but random one time in ten.
inline std::vector<Batch> synthetic_tokens(const GptShape& shape, int64_t batch, uint64_t seed) {
  constexpr int64_t kCount = 32;
  auto generator = at::detail::createCPUGenerator(seed);
  const std::vector<int64_t> sizes{kCount * batch, shape.length + 1};
  Tensor words = torch::randint(shape.vocab, sizes, generator, torch::kLong);
  const Tensor random = torch::rand(sizes, generator) < 0.1;
  for (int64_t i = 1; i < sizes[1]; ++i) {
    words.select(1, i).copy_(torch::where(random.select(1, i), words.select(1, i),
                                          (words.select(1, i - 1) * 5 + 7) % shape.vocab));
  }
  std::vector<Batch> batches;
  for (const auto& part : words.split(batch)) {
    batches.push_back({part.narrow(1, 0, shape.length).contiguous(),
                       part.narrow(1, 1, shape.length).contiguous()});
  }
  return batches;
}

}  // namespace bench
