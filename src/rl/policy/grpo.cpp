#include "lockstep/rl/grpo.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "lockstep/core/error.h"
#include "rl/policy/with_hidden.h"

namespace lockstep::rl {
namespace {

constexpr double kSmallest = 1e-4;  // TRL's, added to deviations

double mean_of(std::span<const double> values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

double deviation_of(std::span<const double> values) {
  if (values.size() < 2) return 0;
  const double mean = mean_of(values);
  double sum = 0;
  for (const double value : values) sum += (value - mean) * (value - mean);
  return std::sqrt(sum / static_cast<double>(values.size() - 1));
}

void check_groups(std::span<const double> rewards, int64_t group_size) {
  if (group_size < 1 || static_cast<int64_t>(rewards.size()) % group_size != 0) {
    throw ConfigError(
        fmt::format("[grpo] {} rewards are no groups of {}", rewards.size(), group_size));
  }
}

std::span<const double> group_of(std::span<const double> rewards, int64_t group_size,
                                 size_t number) {
  const auto size = static_cast<size_t>(group_size);
  return rewards.subspan(number * size, size);
}

}  // namespace

ScaleRewards scale_rewards(std::string_view name) {
  if (name == "std") return ScaleRewards::Std;
  if (name == "none") return ScaleRewards::None;
  if (name == "batch") return ScaleRewards::Batch;
  throw ConfigError(fmt::format("[grpo] scale-rewards = {}: std, none or batch", name));
}

LossNorm loss_norm(std::string_view name) {
  if (name == "token") return LossNorm::Token;
  if (name == "sequence") return LossNorm::Sequence;
  if (name == "constant") return LossNorm::Constant;
  throw ConfigError(fmt::format("[grpo] loss-norm = {}: token, sequence or constant", name));
}

std::vector<double> advantages(std::span<const double> rewards, int64_t group_size,
                               ScaleRewards scale) {
  check_groups(rewards, group_size);
  const double of_all = scale == ScaleRewards::Batch ? deviation_of(rewards) : 0;
  std::vector<double> out;
  for (size_t g = 0; g * static_cast<size_t>(group_size) < rewards.size(); ++g) {
    const auto group = group_of(rewards, group_size, g);
    const double mean = mean_of(group);
    const double deviation = scale == ScaleRewards::Std ? deviation_of(group) : of_all;
    const double divisor = scale == ScaleRewards::None ? 1 : deviation + kSmallest;
    for (const double reward : group) out.push_back((reward - mean) / divisor);
  }
  return out;
}

std::vector<uint8_t> equal_groups(std::span<const double> rewards, int64_t group_size) {
  check_groups(rewards, group_size);
  std::vector<uint8_t> out;
  for (size_t g = 0; g * static_cast<size_t>(group_size) < rewards.size(); ++g) {
    const auto group = group_of(rewards, group_size, g);
    const auto [least, most] = std::minmax_element(group.begin(), group.end());
    out.push_back(*most - *least < 1e-9 ? 1 : 0);
  }
  return out;
}

std::vector<float> token_weights(std::span<const int64_t> lengths, LossNorm norm,
                                 const GlobalCounts& counts) {
  std::vector<float> out;
  for (const int64_t length : lengths) {
    double weight = 0;
    if (norm == LossNorm::Token) weight = 1 / static_cast<double>(counts.tokens);
    if (norm == LossNorm::Sequence)
      weight = 1 / (static_cast<double>(length) * static_cast<double>(counts.sequences));
    if (norm == LossNorm::Constant)
      weight = 1 / (static_cast<double>(counts.longest) * static_cast<double>(counts.sequences));
    out.insert(out.end(), static_cast<size_t>(length), static_cast<float>(weight));
  }
  return out;
}

OwnTokens own_tokens(std::span<const models::DialogueTokens* const> dialogues) {
  size_t longest = 2;
  for (const auto* dialogue : dialogues) longest = std::max(longest, dialogue->ids.size());
  const size_t width = longest - 1;
  const auto rows = static_cast<int64_t>(dialogues.size());
  OwnTokens out;
  // What fills up a row behind its end is seen by no own token of a causal model.
  out.ids = at::zeros({rows, static_cast<int64_t>(width)}, at::kLong);
  auto* ids = out.ids.mutable_data_ptr<int64_t>();
  std::vector<int64_t> places, targets;
  for (size_t i = 0; i < dialogues.size(); ++i) {
    const auto& dialogue = *dialogues[i];
    const size_t read = dialogue.ids.empty() ? 0 : dialogue.ids.size() - 1;
    std::copy_n(dialogue.ids.begin(), read, ids + i * width);
    const size_t before = targets.size();
    for (size_t k = 1; k < dialogue.ids.size(); ++k) {
      if (dialogue.own[k] == 0) continue;
      places.push_back(static_cast<int64_t>(i * width + k - 1));
      targets.push_back(dialogue.ids[k]);
    }
    out.lengths.push_back(static_cast<int64_t>(targets.size() - before));
  }
  out.places = at::tensor(places, at::kLong);
  out.targets = at::tensor(targets, at::kLong);
  return out;
}

TokenLogProbs own_log_probs(models::Transformer& net, const OwnTokens& tokens,
                            const LogProbOptions& options) {
  const at::Device device = net->head_weight().device();
  const auto part = [&](const at::Tensor& hidden) -> std::vector<at::Tensor> {
    at::Tensor logits = net->head(hidden.flatten(0, 1).index_select(0, tokens.places.to(device)));
    if (options.vocabulary > 0) logits = logits.slice(1, 0, options.vocabulary);
    if (logits.scalar_type() != at::kDouble) logits = logits.to(at::kFloat);
    if (options.temperature > 0 && options.temperature != 1) logits = logits / options.temperature;
    const at::Tensor all = at::log_softmax(logits, -1);
    const at::Tensor log_probs = all.gather(1, tokens.targets.to(device).unsqueeze(1)).squeeze(1);
    if (!options.entropy) return {log_probs};
    const at::NoGradGuard no_grad;
    const at::Tensor values = all.detach();
    return {log_probs, -(values.exp() * values).sum(-1)};
  };
  auto made = with_hidden(net, tokens.ids.to(device), part);
  return {.log_probs = std::move(made[0]),
          .entropy = options.entropy ? std::move(made[1]) : at::Tensor()};
}

GrpoLoss grpo_loss(const GrpoTokens& tokens, const GrpoOptions& options) {
  if (options.beta < 0 || options.clip_low < 0 || options.clip_high < 0 ||
      (options.beta > 0 && !tokens.reference.defined())) {
    throw ConfigError(fmt::format(
        "[grpo] beta = {}, clip-low = {}, clip-high = {}: none may be negative, and a beta needs "
        "the reference's log-probabilities",
        options.beta, options.clip_low, options.clip_high));
  }
  const at::Tensor& now = tokens.log_probs;
  const at::Tensor old = tokens.old.defined() ? tokens.old : now.detach();
  const at::Tensor ratio = (now - old).exp();
  const at::Tensor cut = ratio.clamp(1 - options.clip_low, 1 + options.clip_high);
  at::Tensor each = -at::min(ratio * tokens.advantages, cut * tokens.advantages);
  GrpoLoss out;
  out.kl = at::zeros({}, at::dtype(at::kDouble).device(now.device()));
  if (options.beta > 0) {
    const at::Tensor difference = tokens.reference - now;
    const at::Tensor k3 = difference.exp() - difference - 1;
    each = each + options.beta * k3;
    out.kl = k3.detach().sum(at::kDouble);
  }
  out.loss = (each * tokens.weights).sum();
  const at::Tensor r = ratio.detach();
  const auto count = [](const at::Tensor& where) { return where.sum(at::kDouble); };
  out.clipped_low = count((r < 1 - options.clip_low).logical_and(tokens.advantages < 0));
  out.clipped_high = count((r > 1 + options.clip_high).logical_and(tokens.advantages > 0));
  return out;
}

}  // namespace lockstep::rl
