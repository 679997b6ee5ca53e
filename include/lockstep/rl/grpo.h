// Group-relative policy optimisation: the parts of a step that are functions of numbers alone.
// Shao et al., "DeepSeekMath", 2024 (arXiv 2402.03300); Yu et al., "DAPO", 2025 (2503.14476); Liu
// et al., "Understanding R1-Zero-like training" (Dr. GRPO), 2025 (2503.20783).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "lockstep/models/dialogues.h"
#include "lockstep/models/transformer.h"

namespace lockstep::rl {

// What the difference to the group's mean reward is divided by. Names in brackets are TRL's.
enum class ScaleRewards {
  Std,    // the deviation within the group, plus 1e-4 ["group"]
  None,   // 1: Dr. GRPO ["none"]
  Batch,  // the deviation over all episodes, plus 1e-4 ["batch"]
};

// What the sum over tokens is divided by.
enum class LossNorm {
  Token,     // all tokens of the global batch ["dapo"]
  Sequence,  // an episode's tokens, then the number of episodes ["grpo"]
  Constant,  // the number of episodes times what one may have at most ["dr_grpo"]
};

// The ones of these names: "std", "none", "batch"; "token", "sequence", "constant". Throw
// ConfigError for others.
ScaleRewards scale_rewards(std::string_view name);
LossNorm loss_norm(std::string_view name);

// Options of the loss.
struct GrpoOptions {
  double clip_low = 0.2;   // the ratio counts down to 1 - clip_low,
  double clip_high = 0.2;  // and up to 1 + clip_high
  double beta = 0.1;       // weight of the divergence from the reference; 0: there is none
};

// Advantages of rewards, group by group. Deviations are unbiased (n - 1), and 0 for one episode.
// Throws ConfigError unless there are whole groups.
std::vector<double> advantages(std::span<const double> rewards, int64_t group_size,
                               ScaleRewards scale);

// Per group, 1 where all rewards are equal: nothing is to be learnt from it.
std::vector<uint8_t> equal_groups(std::span<const double> rewards, int64_t group_size);

// Counts over all ranks, which the loss is divided by.
struct GlobalCounts {
  int64_t tokens = 0;     // written by the model
  int64_t sequences = 0;  // episodes
  int64_t longest = 0;    // for LossNorm::Constant: tokens that an episode may have
};

// What each own token counts in the loss, episode by episode. lengths: own tokens of each of this
// part's episodes. The weights of all parts of a global batch add up to 1 (with Constant to less).
std::vector<float> token_weights(std::span<const int64_t> lengths, LossNorm norm,
                                 const GlobalCounts& counts);

// The tokens of some dialogues that the model wrote, in order of dialogue and position.
struct OwnTokens {
  at::Tensor ids;                // dialogues x (longest - 1), int64: what the model reads
  at::Tensor places;             // in ids, flattened: what stands before each own token
  at::Tensor targets;            // the own tokens
  std::vector<int64_t> lengths;  // how many each dialogue has
};
// The own tokens of dialogues on the CPU, all of one model; the longest decides the width.
OwnTokens own_tokens(std::span<const models::DialogueTokens* const> dialogues);

// What a model thinks of them.
struct TokenLogProbs {
  at::Tensor log_probs;  // of each own token, float32 or wider, at the temperature
  at::Tensor entropy;    // of each token's distribution, without gradient; where it was asked for
};

// Options of own_log_probs().
struct LogProbOptions {
  double temperature = 1;  // that the tokens were drawn at; for one of 0, 1
  int64_t vocabulary = 0;  // numbers below it could be drawn; 0: all of the model's
  bool entropy = false;
  // Tokens whose logits exist at a time; 0: as many as make about 16 MiB of logits, 64 at least.
  int64_t chunk = 0;
};

// The model's log-probabilities, with gradients unless those are off. Logits are computed at own
// tokens only; of more than one chunk none are kept, and backward computes each chunk's again.
TokenLogProbs own_log_probs(models::Transformer& net, const OwnTokens& tokens,
                            const LogProbOptions& options = {});

// What grpo_loss() needs. All of one length, that of the log-probabilities.
struct GrpoTokens {
  at::Tensor log_probs;   // by the policy, with gradients
  at::Tensor old;         // when they were drawn; undefined: as now
  at::Tensor reference;   // by the reference; undefined where beta is 0
  at::Tensor advantages;  // each token's episode's
  at::Tensor weights;     // token_weights()
};

// A part of the loss, and sums over its tokens for logs, which are float64 tensors of one element.
struct GrpoLoss {
  at::Tensor loss;                       // to be added up over all parts of the global batch
  at::Tensor kl;                         // of k3, the divergence's estimate
  at::Tensor clipped_low, clipped_high;  // tokens whose ratio was below, above, and cut
};

// The sum over tokens of weight * (-min(r A, clip(r) A) + beta k3), with r = exp(log_prob - old)
// and k3 = exp(reference - log_prob) - (reference - log_prob) - 1 (Schulman, "Approximating KL
// divergence", 2020). With `old` undefined r is 1, its gradient is not 0. Where both terms of the
// minimum are equal, the gradient is that of r A. Throws ConfigError for tensors of several
// lengths, negative options, and a beta without a reference.
GrpoLoss grpo_loss(const GrpoTokens& tokens, const GrpoOptions& options = {});

}  // namespace lockstep::rl
