#include "lockstep/rl/grpo.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "lockstep/core/error.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using rl::advantages;
using rl::equal_groups;
using rl::GlobalCounts;
using rl::GrpoOptions;
using rl::GrpoTokens;
using rl::LossNorm;
using rl::ScaleRewards;
using rl::token_weights;
using testing::DoubleNear;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pointwise;

TEST(Advantages, AreDifferencesToTheGroupsMean) {
  const std::vector<double> rewards{1, 0, 0, 0, 1, 1};
  EXPECT_THAT(advantages(rewards, 2, ScaleRewards::None), ElementsAre(0.5, -0.5, 0, 0, 0, 0));
  const double one = 0.5 / (std::sqrt(0.5) + 1e-4);
  EXPECT_THAT(advantages(rewards, 2, ScaleRewards::Std),
              Pointwise(DoubleNear(1e-12), {one, -one, 0.0, 0.0, 0.0, 0.0}));
  const double all = 0.5 / (std::sqrt(0.3) + 1e-4);
  EXPECT_THAT(advantages(rewards, 2, ScaleRewards::Batch),
              Pointwise(DoubleNear(1e-12), {all, -all, 0.0, 0.0, 0.0, 0.0}));
  EXPECT_THAT(equal_groups(rewards, 2), ElementsAre(0, 1, 1));
}

TEST(Advantages, OfOneEpisodeAGroupAreZero) {
  EXPECT_THAT(advantages(std::vector<double>{1, 0}, 1, ScaleRewards::Std), ElementsAre(0, 0));
}

TEST(Advantages, NeedWholeGroups) {
  EXPECT_THAT(message_of<ConfigError>([] {
                advantages(std::vector<double>{1, 0, 1}, 2, ScaleRewards::Std);
              }),
              HasSubstr("3 rewards cannot be split into groups of 2"));
}

TEST(TokenWeights, AddUpToOneOverAllParts) {
  const std::vector<int64_t> here{3, 1}, there{2};
  const GlobalCounts counts{.tokens = 6, .sequences = 3, .longest = 8};
  for (const auto norm : {LossNorm::Token, LossNorm::Sequence, LossNorm::Constant}) {
    double sum = 0;
    for (const auto* part : {&here, &there}) {
      for (const float weight : token_weights(*part, norm, counts)) sum += weight;
    }
    EXPECT_NEAR(sum, norm == LossNorm::Constant ? 6.0 / 24 : 1, 1e-6);
  }
}

// Three episodes of 3, 1 and 2 own tokens.
const std::vector<int64_t> kLengths{3, 1, 2};
const std::vector<double> kLogProbs{-0.5, -1.25, -2.0, -0.1, -3.0, -0.7};
const std::vector<double> kOld{-0.9, -1.2, -1.5, -0.35, -2.6, -0.7};
const std::vector<double> kReference{-0.6, -1.0, -2.4, -0.2, -2.5, -1.1};
const std::vector<double> kAdvantages{0.8, 0.8, 0.8, -1.3, 0.5, 0.5};

// What TRL 1.16.0's GRPOTrainer._compute_loss makes of them with epsilon 0.2, epsilon_high 0.28 and
// max_completion_length 8, in float64: loss and gradient.
struct Recorded {
  const char* norm;
  double beta;
  bool has_old;
  double loss;
  std::vector<double> gradient;
};
const std::vector<Recorded> kRecorded{
    {"sequence",
     0,
     false,
     -0.000000000,
     {-0.088888889, -0.088888889, -0.088888889, 0.433333333, -0.083333333, -0.083333333}},
    {"sequence",
     0,
     true,
     0.164972336,
     {0.000000000, -0.084553727, -0.053913836, 0.556411014, -0.055860004, -0.083333333}},
    {"sequence",
     0.1,
     false,
     0.005025079,
     {-0.087831527, -0.092044727, -0.085225778, 0.436505419, -0.094145355, -0.077838667}},
    {"sequence",
     0.1,
     true,
     0.169997415,
     {0.001057362, -0.087709565, -0.050250726, 0.559583100, -0.066672025, -0.077838667}},
    {"token",
     0,
     false,
     -0.350000000,
     {-0.133333333, -0.133333333, -0.133333333, 0.216666667, -0.083333333, -0.083333333}},
    {"token",
     0,
     true,
     -0.239355841,
     {0.000000000, -0.126830590, -0.080870755, 0.278205507, -0.055860004, -0.083333333}},
    {"token",
     0.1,
     false,
     -0.344448973,
     {-0.131747290, -0.138067090, -0.127838667, 0.218252710, -0.094145355, -0.077838667}},
    {"token",
     0.1,
     true,
     -0.233804815,
     {0.001586043, -0.131564347, -0.075376089, 0.279791550, -0.066672025, -0.077838667}},
    {"constant",
     0,
     false,
     -0.087500000,
     {-0.033333333, -0.033333333, -0.033333333, 0.054166667, -0.020833333, -0.020833333}},
    {"constant",
     0,
     true,
     -0.059838960,
     {0.000000000, -0.031707647, -0.020217689, 0.069551377, -0.013965001, -0.020833333}},
    {"constant",
     0.1,
     false,
     -0.086112243,
     {-0.032936823, -0.034516773, -0.031959667, 0.054563177, -0.023536339, -0.019459667}},
    {"constant",
     0.1,
     true,
     -0.058451204,
     {0.000396511, -0.032891087, -0.018844022, 0.069947887, -0.016668006, -0.019459667}},
};

at::Tensor tensor(const std::vector<double>& values, at::ScalarType dtype) {
  return torch::tensor(values, torch::kDouble).to(dtype);
}

TEST(GrpoLoss, IsThatOfTrl) {
  isolated([] {
    for (const auto dtype : {torch::kDouble, torch::kFloat}) {
      for (const auto& want : kRecorded) {
        const at::Tensor log_probs = tensor(kLogProbs, dtype).requires_grad_();
        GrpoTokens tokens{.log_probs = log_probs, .advantages = tensor(kAdvantages, dtype)};
        if (want.has_old) tokens.old = tensor(kOld, dtype);
        if (want.beta > 0) tokens.reference = tensor(kReference, dtype);
        const auto weights = token_weights(kLengths, rl::loss_norm(want.norm),
                                           {.tokens = 6, .sequences = 3, .longest = 8});
        tokens.weights = torch::tensor(weights).to(dtype);
        const auto got =
            rl::grpo_loss(tokens, {.clip_low = 0.2, .clip_high = 0.28, .beta = want.beta});
        got.loss.backward();
        EXPECT_NEAR(got.loss.item<double>(), want.loss, 1e-6) << want.norm << want.beta;
        EXPECT_LT(
            (log_probs.grad().to(torch::kDouble) - torch::tensor(want.gradient, torch::kDouble))
                .abs()
                .max()
                .item<double>(),
            1e-6)
            << want.norm << want.beta;
      }
    }
  });
}

// By hand, in doubles, token by token.
struct Plain {
  double loss = 0, kl = 0, low = 0, high = 0;
  std::vector<double> gradient;
};
Plain plainly(const GrpoOptions& o, const std::vector<double>& old,
              const std::vector<float>& weights) {
  Plain out;
  for (size_t i = 0; i < kLogProbs.size(); ++i) {
    const double r = std::exp(kLogProbs[i] - old[i]), a = kAdvantages[i], w = weights[i];
    const double cut = std::min(std::max(r, 1 - o.clip_low), 1 + o.clip_high);
    const bool uses_cut = cut * a < r * a;
    const double d = kReference[i] - kLogProbs[i];
    const double k3 = o.beta > 0 ? std::exp(d) - d - 1 : 0;
    out.loss += w * (-std::min(r * a, cut * a) + o.beta * k3);
    out.gradient.push_back(w * ((uses_cut ? 0 : -r * a) + o.beta * (1 - std::exp(d))));
    out.kl += k3;
    out.low += r < 1 - o.clip_low && a < 0 ? 1 : 0;
    out.high += r > 1 + o.clip_high && a > 0 ? 1 : 0;
  }
  return out;
}

TEST(GrpoLoss, IsThatOfAPlainLoop) {
  isolated([] {
    for (const auto norm : {LossNorm::Token, LossNorm::Sequence, LossNorm::Constant}) {
      for (const double beta : {0.0, 0.1}) {
        for (const bool has_old : {false, true}) {
          for (const double high : {0.1, 0.3}) {
            const GrpoOptions options{.clip_low = 0.25, .clip_high = high, .beta = beta};
            const auto weights =
                token_weights(kLengths, norm, {.tokens = 6, .sequences = 3, .longest = 8});
            const auto want = plainly(options, has_old ? kOld : kLogProbs, weights);
            const at::Tensor log_probs = tensor(kLogProbs, torch::kDouble).requires_grad_();
            GrpoTokens tokens{.log_probs = log_probs,
                              .advantages = tensor(kAdvantages, torch::kDouble),
                              .weights = torch::tensor(weights).to(torch::kDouble)};
            if (has_old) tokens.old = tensor(kOld, torch::kDouble);
            if (beta > 0) tokens.reference = tensor(kReference, torch::kDouble);
            const auto got = rl::grpo_loss(tokens, options);
            got.loss.backward();
            EXPECT_NEAR(got.loss.item<double>(), want.loss, 1e-12);
            EXPECT_NEAR(got.kl.item<double>(), want.kl, 1e-12);
            EXPECT_EQ(got.clipped_low.item<double>(), want.low);
            EXPECT_EQ(got.clipped_high.item<double>(), want.high);
            EXPECT_LT((log_probs.grad() - torch::tensor(want.gradient, torch::kDouble))
                          .abs()
                          .max()
                          .item<double>(),
                      1e-12);
          }
        }
      }
    }
  });
}

TEST(GrpoLoss, AtTheReferenceHasNoDivergenceAndStillAGradient) {
  isolated([] {
    const at::Tensor log_probs = tensor(kLogProbs, torch::kFloat).requires_grad_();
    const at::Tensor ones = torch::ones(6);
    const auto only_kl = rl::grpo_loss({.log_probs = log_probs,
                                        .reference = log_probs.detach(),
                                        .advantages = torch::zeros(6),
                                        .weights = ones});
    only_kl.loss.backward();
    EXPECT_EQ(only_kl.kl.item<double>(), 0);
    EXPECT_EQ(log_probs.grad().abs().max().item<double>(), 0);
    rl::grpo_loss({.log_probs = log_probs, .advantages = ones, .weights = ones}, {.beta = 0})
        .loss.backward();
    EXPECT_EQ(log_probs.grad().max().item<double>(), -1);
  });
}

TEST(GrpoLoss, TellsASmallDivergenceFromNone) {
  isolated([] {
    const at::Tensor log_probs = tensor(kLogProbs, torch::kFloat);
    const at::Tensor reference = log_probs + 1e-5;
    const at::Tensor d = (reference - log_probs).to(torch::kDouble);
    const auto loss = rl::grpo_loss({.log_probs = log_probs,
                                     .reference = reference,
                                     .advantages = torch::zeros(6),
                                     .weights = torch::ones(6)});
    const double want = (d * d).sum().item<double>() / 2;
    EXPECT_NEAR(loss.kl.item<double>(), want, 1e-4 * want);
  });
}

// At a tie of the ratio and the cut ratio, what counts is the ratio.
TEST(GrpoLoss, HasItsWholeGradientWithNothingToClipTo) {
  isolated([] {
    for (const auto& [low, high] :
         {std::pair(0.0, 0.2), std::pair(0.2, 0.0), std::pair(0.0, 0.0)}) {
      const at::Tensor log_probs = torch::zeros(2).requires_grad_();
      rl::grpo_loss({.log_probs = log_probs,
                     .advantages = torch::tensor({1.0, -2.0}),
                     .weights = torch::ones(2)},
                    {.clip_low = low, .clip_high = high, .beta = 0})
          .loss.backward();
      EXPECT_TRUE(at::equal(log_probs.grad(), torch::tensor({-1.0, 2.0}))) << low << " " << high;
    }
  });
}

// A ratio beyond float32 that is cut has no gradient, and spoils that of no other token.
TEST(GrpoLoss, CutsRatiosOfAnySize) {
  isolated([] {
    const at::Tensor log_probs = torch::zeros(2).requires_grad_();
    const auto got = rl::grpo_loss({.log_probs = log_probs,
                                    .old = torch::tensor({-100.0, 0.0}),
                                    .advantages = torch::ones(2),
                                    .weights = torch::ones(2)},
                                   {.beta = 0});
    got.loss.backward();
    EXPECT_NEAR(got.loss.item<double>(), -2.2, 1e-6);
    EXPECT_EQ(got.clipped_high.item<double>(), 1);
    EXPECT_TRUE(at::equal(log_probs.grad(), torch::tensor({0.0, -1.0})));
  });
}

TEST(GrpoLoss, NeedsTensorsOfOneLength) {
  isolated([] {
    const at::Tensor two = torch::zeros(2);
    EXPECT_THAT(message_of<ConfigError>([&] {
                  rl::grpo_loss({.log_probs = two, .advantages = torch::zeros(1), .weights = two},
                                {.beta = 0});
                }),
                HasSubstr("log-probabilities of 2 tokens"));
  });
}

TEST(GrpoLoss, WithABetaNeedsAReference) {
  isolated([] {
    const at::Tensor some = torch::zeros(2);
    EXPECT_THAT(message_of<ConfigError>([&] {
                  rl::grpo_loss({.log_probs = some, .advantages = some, .weights = some});
                }),
                HasSubstr("needs the reference's log-probabilities"));
    EXPECT_THROW(rl::grpo_loss({.log_probs = some, .advantages = some, .weights = some},
                               {.beta = std::numeric_limits<double>::quiet_NaN()}),
                 ConfigError);
  });
}

// Log-probabilities of own tokens, of dialogues of unequal lengths, against the whole logits.

}  // namespace
}  // namespace lockstep::test
