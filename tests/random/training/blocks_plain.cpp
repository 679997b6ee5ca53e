// Blocks of ordinary layers.
#include <torch/torch.h>

#include "lockstep/parallel/call.h"
#include "random/training/net.h"

namespace lockstep::test::training {
namespace {

constexpr auto kTogether = at::kDouble;

// Numbers for a parameter: the same on every rank, since make_block() has seeded the generator.
at::Tensor values(at::IntArrayRef sizes, at::ScalarType dtype = kTogether) {
  return (torch::randn(sizes, at::kDouble) * 0.4).to(dtype);
}

// Its weights have a dtype of their own, whatever the dtype of its input and output is.
struct LinearBlock : Block {
  LinearBlock(at::ScalarType dtype, bool strided) {
    weight = register_parameter("weight", values({kFeatures, kFeatures}, dtype));
    bias = register_parameter("bias", values({kFeatures}, dtype));
    if (!strided) return;
    const at::NoGradGuard no_grad;
    weight.set_data(weight.t().contiguous().t());
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor&, const Moment&) override {
    const auto y = at::linear(x.to(weight.scalar_type()), weight, bias);
    return torch::tanh(y.to(x.scalar_type()));
  }
  at::Tensor weight, bias;
};

struct ConvBlock : Block {
  explicit ConvBlock(bool channels_last) {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 2, 3).padding(1)));
    conv->to(kTogether);
    if (!channels_last) return;
    const at::NoGradGuard no_grad;
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor&, const Moment&) override {
    return x + torch::tanh(lockstep::call(conv, x.reshape({-1, 2, 1, 3}))).reshape({-1, kFeatures});
  }
  torch::nn::Conv2d conv{nullptr};
};

struct LayerNormBlock : Block {
  LayerNormBlock() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kFeatures})));
    norm->to(kTogether);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor&, const Moment&) override {
    return lockstep::call(norm, x);
  }
  torch::nn::LayerNorm norm{nullptr};
};

struct EmbeddingBlock : Block {
  explicit EmbeddingBlock(bool sparse) {
    table = register_module(
        "table",
        torch::nn::Embedding(torch::nn::EmbeddingOptions(kTokens, kFeatures).sparse(sparse)));
    table->to(kTogether);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& tokens, const Moment&) override {
    return torch::tanh(x + lockstep::call(table, tokens));
  }
  torch::nn::Embedding table{nullptr};
};

struct LstmBlock : Block {
  LstmBlock() {
    lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(3, 3).batch_first(true)));
    lstm->to(kTogether);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor&, const Moment&) override {
    return std::get<0>(lockstep::call(lstm, x.reshape({-1, 2, 3}))).reshape({-1, kFeatures});
  }
  torch::nn::LSTM lstm{nullptr};
};

struct AttentionBlock : Block {
  AttentionBlock() {
    attention = register_module("attention", torch::nn::MultiheadAttention(3, 1));
    attention->to(kTogether);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor&, const Moment&) override {
    const auto sequence = x.reshape({-1, 2, 3}).transpose(0, 1);
    const auto [y, weights] = lockstep::call(attention, sequence, sequence, sequence);
    return x + y.transpose(0, 1).reshape({-1, kFeatures});
  }
  torch::nn::MultiheadAttention attention{nullptr};
};

// Sequential's forward calls its modules by itself.
struct SequentialBlock : Block {
  SequentialBlock() {
    row = register_module("row",
                          torch::nn::Sequential(torch::nn::Linear(kFeatures, 4), torch::nn::Tanh(),
                                                torch::nn::Linear(4, kFeatures)));
    row->to(kTogether);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor&, const Moment&) override {
    return x + lockstep::call(row, x);
  }
  torch::nn::Sequential row{nullptr};
};

// Running statistics of this rank's own batches.
struct BatchNormBlock : Block {
  BatchNormBlock() {
    norm = register_module("norm", torch::nn::BatchNorm1d(kFeatures));
    norm->to(kTogether);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor&, const Moment&) override {
    return lockstep::call(norm, x);
  }
  torch::nn::BatchNorm1d norm{nullptr};
};

struct ScaleBlock : Block {
  ScaleBlock() { scale = register_parameter("scale", values({})); }
  at::Tensor forward(const at::Tensor& x, const at::Tensor&, const Moment&) override {
    return x * (1 + scale);
  }
  at::Tensor scale;
};

template <class Kind, class... Arguments>
MakeBlock plain(Arguments... arguments) {
  return [arguments...](Random&, const Group&) { return std::make_shared<Kind>(arguments...); };
}

}  // namespace

void add_plain_blocks(std::map<std::string, MakeBlock>& table) {
  table["linear"] = plain<LinearBlock>(kTogether, false);
  table["linear_float32"] = plain<LinearBlock>(at::kFloat, false);
  table["linear_bfloat16"] = plain<LinearBlock>(at::kBFloat16, false);
  table["linear_float16"] = plain<LinearBlock>(at::kHalf, false);
  table["linear_transposed"] = plain<LinearBlock>(kTogether, true);
  table["conv"] = plain<ConvBlock>(false);
  table["conv_channels_last"] = plain<ConvBlock>(true);
  table["layer_norm"] = plain<LayerNormBlock>();
  table["embedding"] = plain<EmbeddingBlock>(false);
  table["embedding_sparse"] = plain<EmbeddingBlock>(true);
  table["lstm"] = plain<LstmBlock>();
  table["attention"] = plain<AttentionBlock>();
  table["batch_norm"] = plain<BatchNormBlock>();
  table["sequential"] = plain<SequentialBlock>();
  table["scale"] = plain<ScaleBlock>();
}

}  // namespace lockstep::test::training
