// What on_token may do.
#include "lockstep/models/generate.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>

#include "support/spawn.h"

namespace lockstep::models {
namespace {

Transformer tiny() {
  torch::manual_seed(1);
  return Transformer(TransformerOptions{.vocabulary = 64, .layers = 1, .hidden = 32, .heads = 2});
}

TEST(OnToken, RunsWithTheCallersGradients) {
  test::isolated([] {
    Transformer net = tiny();
    torch::Tensor kept, loss;
    GenerateOptions options{.max_new_tokens = 1};
    options.on_token = [&](size_t, int32_t token) {
      kept = torch::ones({3});
      loss = net->forward(torch::tensor({{static_cast<int64_t>(token)}})).sum();
    };
    (void)generate(net, {{1, 2}}, options);
    loss.backward();
    EXPECT_TRUE(net->parameters()[0].grad().defined());
    const auto weight = torch::ones({3}, torch::requires_grad());
    (weight * kept).sum().backward();
    const torch::NoGradGuard none;
    (void)generate(net, {{1, 2}}, options);
    EXPECT_FALSE(loss.requires_grad());
  });
}

TEST(OnToken, MayChangeTheOptionsItCameFrom) {
  test::isolated([] {
    Transformer net = tiny();
    GenerateOptions options{.max_new_tokens = 6};
    const auto expected = generate(net, {{1, 2}}, options);
    int calls = 0;
    options.on_token = [&](size_t, int32_t) {
      options.max_new_tokens = 0;
      ++calls;
    };
    EXPECT_EQ(generate(net, {{1, 2}}, options), expected);
    EXPECT_EQ(calls, 6);
  });
}

TEST(OnToken, MayGenerateAndThrow) {
  test::isolated([] {
    Transformer net = tiny();
    GenerateOptions options{.max_new_tokens = 4};
    const auto expected = generate(net, {{1, 2}}, options), other = generate(net, {{9}}, options);
    GenerateOptions nested = options;
    nested.on_token = [&](size_t, int32_t) { EXPECT_EQ(generate(net, {{9}}, options), other); };
    EXPECT_EQ(generate(net, {{1, 2}}, nested), expected);
    nested.on_token = [](size_t, int32_t) { throw std::runtime_error("stop"); };
    EXPECT_THROW((void)generate(net, {{1, 2}}, nested), std::runtime_error);
    EXPECT_TRUE(net->is_training());
  });
}

}  // namespace
}  // namespace lockstep::models
