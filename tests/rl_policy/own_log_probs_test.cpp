#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>

#include "lockstep/parallel/fsdp.h"
#include "lockstep/rl/grpo.h"
#include "plan/measure/allocations.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using models::DialogueTokens;
using models::Transformer;
using testing::ElementsAre;

TEST(OwnLogProbs, AreThoseOfTheTokensThatTheModelWrote) {
  isolated([] {
    torch::manual_seed(1);
    Transformer net({.vocabulary = 20,
                     .layers = 1,
                     .hidden = 16,
                     .heads = 2,
                     .max_length = 16,
                     .initial_deviation = 0.3});
    const DialogueTokens first{.ids = {1, 2, 3, 4, 5, 6}, .own = {0, 0, 1, 1, 0, 1}};
    const DialogueTokens second{.ids = {7, 8, 9}, .own = {0, 1, 1}};
    const std::vector<const DialogueTokens*> both{&first, &second};
    const auto tokens = rl::own_tokens(both);
    EXPECT_THAT(tokens.lengths, ElementsAre(3, 2));
    const auto got =
        rl::own_log_probs(net, tokens, {.temperature = 0.5, .vocabulary = 12, .entropy = true});
    const auto expected = [&](const std::vector<int64_t>& ids, int64_t place) {
      const at::Tensor logits = net->forward(torch::tensor(ids).unsqueeze(0))[0][place - 1];
      const at::Tensor all = torch::log_softmax(logits.slice(0, 0, 12) / 0.5, -1);
      return std::pair(all[ids[place]].item<double>(), -(all.exp() * all).sum().item<double>());
    };
    const std::vector<int64_t> a{1, 2, 3, 4, 5, 6}, b{7, 8, 9};
    const std::vector<std::pair<double, double>> want{
        expected(a, 2), expected(a, 3), expected(a, 5), expected(b, 1), expected(b, 2)};
    for (int64_t i = 0; i < 5; ++i) {
      EXPECT_NEAR(got.log_probs[i].item<double>(), want[i].first, 1e-5) << i;
      EXPECT_NEAR(got.entropy[i].item<double>(), want[i].second, 1e-5) << i;
    }
    got.log_probs.sum().backward();
    EXPECT_GT(net->head_weight().grad().abs().max().item<double>(), 0);
  });
}

// Seven own tokens of one dialogue, for a model of this seed.
Transformer for_seven() {
  torch::manual_seed(1);
  return Transformer({.vocabulary = 20,
                      .layers = 1,
                      .hidden = 16,
                      .heads = 2,
                      .max_length = 16,
                      .initial_deviation = 0.3});
}

rl::OwnTokens seven_tokens() {
  const DialogueTokens dialogue{.ids = {1, 2, 3, 4, 5, 6, 7, 8}, .own = {0, 1, 1, 1, 1, 1, 1, 1}};
  return rl::own_tokens(std::vector<const DialogueTokens*>{&dialogue});
}

at::Tensor seven_weights() { return torch::arange(1, 8, torch::kFloat) / 7; }

TEST(OwnLogProbs, AreTheSameInChunksOfAnySize) {
  isolated([] {
    const auto of = [](int64_t chunk) {
      Transformer net = for_seven();
      auto got = rl::own_log_probs(
          net, seven_tokens(),
          {.temperature = 0.5, .vocabulary = 12, .entropy = true, .chunk = chunk});
      EXPECT_FALSE(got.entropy.requires_grad());
      (got.log_probs * seven_weights()).sum().backward();
      std::vector<at::Tensor> out = {got.log_probs.detach(), got.entropy};
      for (const auto& parameter : net->parameters()) out.push_back(parameter.grad());
      return out;
    };
    const auto whole = of(7);
    for (const int64_t chunk : {1, 3, 6}) {
      const auto parts = of(chunk);
      for (size_t i = 0; i < whole.size(); ++i) {
        EXPECT_TRUE(at::allclose(parts[i], whole[i], 1e-5, 1e-6)) << chunk << " " << i;
      }
    }
    // Without gradients, as a reference's.
    const at::NoGradGuard no_grad;
    Transformer net = for_seven();
    const auto options = rl::LogProbOptions{.temperature = 0.5, .vocabulary = 12, .chunk = 2};
    EXPECT_TRUE(at::allclose(rl::own_log_probs(net, seven_tokens(), options).log_probs, whole[0],
                             1e-5, 1e-6));
  });
}

// A policy that is still its reference diverges in no bit: Adam makes a step of any gradient.
TEST(OwnLogProbs, HaveTheBitsOfThoseWithoutGradients) {
  isolated([] {
    torch::manual_seed(1);
    Transformer net({.vocabulary = 50, .layers = 2, .hidden = 32, .heads = 2, .max_length = 64});
    for (const int64_t own : {1, 7, 8, 9, 40}) {
      DialogueTokens dialogue;
      for (int64_t i = 0; i <= own + 3; ++i) {
        dialogue.ids.push_back(static_cast<int32_t>(i % 50));
        dialogue.own.push_back(i > 3 ? 1 : 0);
      }
      const auto tokens = rl::own_tokens(std::vector<const DialogueTokens*>{&dialogue});
      const at::Tensor policy = rl::own_log_probs(net, tokens, {.entropy = true}).log_probs;
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(at::equal(policy, rl::own_log_probs(net, tokens, {}).log_probs)) << own;
    }
  });
}

TEST(OwnLogProbs, ChunksOfADividedModelHaveItsGradients) {
  spawn(2, [](World& world) {
    const auto norm = [&](int64_t chunk) {
      Transformer net = for_seven();
      parallel::Fsdp fsdp(net, world.group(),
                          {.units = parallel::units_of<models::TransformerBlockImpl>(*net)});
      const auto got = rl::own_log_probs(net, seven_tokens(), {.chunk = chunk});
      (got.log_probs * seven_weights()).sum().backward();
      return fsdp.clip_grad_norm_(1e9).item<double>();
    };
    const double whole = norm(7);
    EXPECT_GT(whole, 0);
    EXPECT_NEAR(norm(3), whole, 1e-5 * whole);
  });
}

// Memory does not grow by tokens x vocabulary.
TEST(OwnLogProbs, OfManyTokensNeverHaveAllLogits) {
  isolated([] {
    constexpr int64_t kVocabulary = 1 << 16, kTokens = 511;
    Transformer net(
        {.vocabulary = kVocabulary, .layers = 1, .hidden = 8, .heads = 1, .max_length = kTokens});
    const DialogueTokens dialogue{.ids = std::vector<int32_t>(kTokens + 1, 1),
                                  .own = std::vector<uint8_t>(kTokens + 1, 1)};
    const auto tokens = rl::own_tokens(std::vector<const DialogueTokens*>{&dialogue});
    const auto memory = std::make_shared<plan::Allocations>();
    const plan::Allocations::Watch watch(memory);
    rl::own_log_probs(net, tokens, {.entropy = true}).log_probs.sum().backward();
    EXPECT_LT(memory->peak(), 4.0 * kVocabulary * kTokens);
  });
}

}  // namespace
}  // namespace lockstep::test
