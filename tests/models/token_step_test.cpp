// One token without libtorch's operators is one token with them.
#include "models/token_step/token_step.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <type_traits>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/models/generate.h"
#include "lockstep/parallel/activation_checkpointing.h"
#include "lockstep/parallel/autocast.h"
#include "models/token_step/kernels.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using models::KvCache;
using models::TokenStep;
using models::Transformer;
using models::TransformerOptions;
using testing::HasSubstr;

double apart(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

Transformer net_of(TransformerOptions options) {
  torch::manual_seed(3);
  options.vocabulary = 50;
  options.layers = 2;
  options.max_length = 64;
  options.initial_deviation = 0.3;
  Transformer net(options);
  const at::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) {  // norms begin as ones
    if (parameter.dim() == 1) parameter.uniform_(0.5, 1.5);
  }
  return net;
}

at::Tensor ids_of(int64_t rows, int64_t length) {
  return torch::arange(rows * length).mul(7).remainder(50).view({rows, length});
}

// Each row has seen a beginning of its own length; then come tokens, one at a time.
void expect_same(const TransformerOptions& options, int64_t rows, bool even) {
  SCOPED_TRACE(rows);
  Transformer net = net_of(options);
  const at::NoGradGuard no_grad;
  const int64_t longest = 11, steps = 6;
  const at::Tensor ids = ids_of(rows, longest + steps);
  KvCache cache = net->make_cache(rows, longest + steps);
  net->hidden(ids.slice(1, 0, longest), cache);
  std::vector<int64_t> lengths;
  for (int64_t row = 0; row < rows; ++row) lengths.push_back(even ? longest : 1 + row % longest);
  cache.set_lengths(lengths);
  const at::Tensor whole = net->hidden(ids);
  for (int64_t step = 0; step < steps; ++step) {
    std::vector<at::Tensor> next, expected;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = lengths[static_cast<size_t>(row)] + step;
      next.push_back(ids[row][at].view({1}));
      expected.push_back(whole[row][at].view({1, -1}));
    }
    const at::Tensor column = torch::stack(next);
    ASSERT_TRUE(TokenStep::of(*net, column, cache).has_value());
    const at::Tensor hidden = net->hidden(column, cache);
    EXPECT_LE(apart(hidden, torch::stack(expected)), 2e-5) << "step " << step;
    EXPECT_LE(apart(net->head(hidden), at::linear(hidden, net->head_weight())), 2e-5);
  }
  EXPECT_EQ(cache.lengths()[0], lengths[0] + steps);
}

TEST(TokenStep, IsTheNextColumnOfTheWhole) {
  isolated([] {
    const TransformerOptions usual{.hidden = 64, .heads = 4, .kv_heads = 2};
    // No size is a multiple of anything.
    const TransformerOptions odd{
        .hidden = 21, .feed_forward = 37, .heads = 6, .kv_heads = 2, .head_dim = 22, .tied = false};
    const TransformerOptions wide{.hidden = 72, .heads = 3, .head_dim = 72};
    for (const auto& options : {usual, odd, wide}) {
      for (const int64_t rows : {1, 2, 3}) expect_same(options, rows, true);
      expect_same(options, 5, false);
    }
    expect_same(odd, 19, false);  // products of libtorch's
    at::set_num_threads(2);
    expect_same({.hidden = 256, .heads = 8, .head_dim = 64}, 5, false);
  });
}

TEST(TokenStep, IsNotForWhatItDoesNotHave) {
  isolated([] {
    const TransformerOptions options{.hidden = 32, .heads = 4};
    Transformer net = net_of(options);
    KvCache cache = net->make_cache(2, 8);
    const at::Tensor ids = ids_of(2, 1);
    const auto suits = [&](Transformer& of, const at::Tensor& given, KvCache& with) {
      return TokenStep::of(*of, given, with).has_value();
    };
    EXPECT_FALSE(suits(net, ids, cache)) << "gradients";
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(suits(net, ids, cache));
    EXPECT_FALSE(suits(net, ids_of(2, 3), cache)) << "several tokens";
    EXPECT_FALSE(suits(net, ids_of(3, 1), cache)) << "other sequences";
    EXPECT_FALSE(suits(net, ids + 50, cache)) << "no tokens";
    EXPECT_THROW(net->hidden(ids + 50, cache), c10::Error);
    {
      const Autocast autocast(at::kCPU, at::kBFloat16);
      EXPECT_FALSE(suits(net, ids, cache)) << "autocast";
    }
    {
      const ActivationCheckpointing recompute(net->recomputed(models::Recomputed::Full));
      EXPECT_FALSE(suits(net, ids, cache)) << "layers with something attached";
    }
    Transformer drops = net_of({.hidden = 32, .heads = 4, .dropout = 0.5});
    EXPECT_FALSE(suits(drops, ids, cache)) << "dropout";
    drops->eval();
    EXPECT_TRUE(suits(drops, ids, cache));
    KvCache bare({cache.memory(0), cache.memory(1)}, 2, 8);
    EXPECT_FALSE(suits(net, ids, bare)) << "a cache of somebody else's";

    for (int step = 0; step < 8; ++step) net->hidden(ids, cache);
    EXPECT_THAT(message_of<ConfigError>([&] { net->hidden(ids, cache); }),
                HasSubstr("9 tokens, made for 8"));

    auto& turned = net->model->layers->children()[0]->named_parameters()["mlp.up_proj.weight"];
    KvCache empty = net->make_cache(2, 8);
    turned.set_data(turned.t().contiguous().t());
    EXPECT_FALSE(suits(net, ids, empty)) << "a weight that is not contiguous";
    const at::Tensor before = net->hidden(ids, empty);
    turned.set_data(turned.contiguous());
    KvCache again = net->make_cache(2, 8);
    EXPECT_TRUE(suits(net, ids, again));
    EXPECT_LE(apart(net->hidden(ids, again), before), 1e-5);

    net->to(at::kDouble);
    KvCache doubles = net->make_cache(2, 8);
    EXPECT_FALSE(suits(net, ids, doubles)) << "another dtype";
    net->hidden(ids, doubles);
  });
}

TEST(KvCache, WhatDoesNotFitIsRefused) {
  isolated([] {
    Transformer net = net_of({.hidden = 32, .heads = 4});
    const at::NoGradGuard no_grad;
    const auto refused = [](const auto& call) { return message_of<ConfigError>(call); };
    static_assert(!std::is_copy_constructible_v<KvCache>, "both would store in the same memory");
    KvCache cache = net->make_cache(3, 8);
    for (const int64_t length : {1, 2}) {
      EXPECT_THAT(refused([&] { net->hidden(ids_of(1, length), cache); }),
                  HasSubstr("ids of 1 sequence for a KvCache of 3"));
    }
    net->hidden(ids_of(3, 4), cache);
    EXPECT_THAT(refused([&] {
                  cache.set_lengths({4, 5, 4});
                }),
                HasSubstr("sequence 1 has 4 tokens; it cannot get 5"));
    EXPECT_THAT(refused([&] { cache.set_lengths({4, 4, -1}); }), HasSubstr("cannot get -1"));
    cache.set_lengths({4, 0, 2});
    EXPECT_EQ(cache.lengths(), (std::vector<int64_t>{4, 0, 2}));
    EXPECT_THAT(refused([&] { cache.keep({}); }), HasSubstr("no sequence would be kept"));
    EXPECT_THAT(refused([&] { cache.keep({0, 3}); }), HasSubstr("there is no sequence 3 of 3"));
    EXPECT_THAT(refused([&] { cache.keep({-1}); }), HasSubstr("there is no sequence -1 of 3"));
    EXPECT_EQ(cache.lengths(), (std::vector<int64_t>{4, 0, 2}));
    EXPECT_THAT(refused([&] { net->make_cache(0, 8); }), HasSubstr("sequences of a KvCache = 0"));
    EXPECT_THAT(refused([&] { net->make_cache(1, -1); }), HasSubstr("length of a KvCache = -1"));
  });
}

// Infinite and undefined values go on as such.
TEST(TokenStep, NotANumberStaysOne) {
  isolated([] {
    Transformer net = net_of({.hidden = 32, .heads = 4});
    const at::NoGradGuard no_grad;
    KvCache cache = net->make_cache(2, 8);
    net->model->embed_tokens->weight[7].fill_(NAN);
    const at::Tensor hidden = net->hidden(torch::tensor({{3}, {7}}), cache);
    EXPECT_TRUE(hidden[0].isfinite().all().item<bool>());
    EXPECT_TRUE(hidden[1].isnan().all().item<bool>());
  });
}

const float* data(const at::Tensor& tensor) { return tensor.const_data_ptr<float>(); }

void expect_kernels(const models::TokenKernels& kernels) {
  torch::manual_seed(5);
  for (const int64_t columns : {1, 7, 16, 67}) {
    for (const int64_t count : {1, 2, 5}) {
      const at::Tensor weight = torch::randn({21, columns}), x = torch::randn({count, columns});
      at::Tensor y = torch::full({count, 21}, 9.F);
      kernels.product({data(weight), columns, data(x), count, y.mutable_data_ptr<float>(), 21}, 2,
                      20);
      EXPECT_LE(apart(y.slice(1, 2, 20), at::linear(x, weight).slice(1, 2, 20)), 1e-4);
      EXPECT_TRUE((y.slice(1, 0, 2) == 9).all().item<bool>());
      EXPECT_TRUE((y.slice(1, 20) == 9).all().item<bool>());
    }
    const at::Tensor x = torch::randn({columns}), weight = torch::randn({columns});
    at::Tensor y = torch::empty({columns});
    kernels.normalise({data(x), data(weight), columns, 1e-6F, y.mutable_data_ptr<float>()});
    EXPECT_LE(apart(y, x * (x.square().mean() + 1e-6).rsqrt() * weight), 1e-5);
    at::Tensor gate = torch::randn({columns}) * 40;
    gate[0] = 1000;
    gate[columns - 1] = -1000;
    const at::Tensor expected = at::silu(gate.to(at::kDouble)) * weight;
    kernels.swiglu(gate.mutable_data_ptr<float>(), data(weight), columns);
    EXPECT_LE(apart(gate / (1 + expected.abs()), expected / (1 + expected.abs())), 1e-6);
  }
  for (const int64_t size : {2, 22, 64, 128}) {
    for (const int64_t length : {1, 5, 40}) {
      const at::Tensor q = torch::randn({3, size}) * 3, k = torch::randn({length, size}),
                       v = torch::randn({length, size});
      at::Tensor scores = torch::empty({3, length}), y = torch::empty({3, size});
      kernels.attend({data(q), data(k), data(v), 3, length, size, scores.mutable_data_ptr<float>(),
                      y.mutable_data_ptr<float>()});
      const at::Tensor wide = at::matmul(q.to(at::kDouble), k.to(at::kDouble).t());
      const at::Tensor expected =
          at::matmul((wide / std::sqrt(size)).softmax(1), v.to(at::kDouble));
      EXPECT_LE(apart(y, expected), 2e-5);
    }
  }
}

TEST(TokenKernels, ComputeWhatTheySayOnEveryProcessor) {
  isolated([] {
    expect_kernels(models::baseline::kTokenKernels);
    expect_kernels(models::token_kernels());
  });
}

}  // namespace
}  // namespace lockstep::test
