#include "lockstep/rl/grpo.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "lockstep/core/error.h"
#include "rl/policy/groups.h"
#include "rl/policy/with_hidden.h"

namespace lockstep::rl {
namespace {

constexpr double kSmallest = 1e-4;         // TRL's, added to deviations
constexpr int64_t kChunkBytes = 16 << 20;  // of logits at a time

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

// Of the targets, and, where it is asked for, the entropy.
std::vector<at::Tensor> log_probs_of(at::Tensor logits, const at::Tensor& targets,
                                     const LogProbOptions& options) {
  if (options.vocabulary > 0) logits = logits.slice(1, 0, options.vocabulary);
  if (logits.scalar_type() != at::kDouble) logits = logits.to(at::kFloat);
  if (options.temperature > 0 && options.temperature != 1) logits = logits / options.temperature;
  const at::Tensor all = at::log_softmax(logits, -1);
  const at::Tensor log_probs = all.gather(1, targets.unsqueeze(1)).squeeze(1);
  if (!options.entropy) return {log_probs};
  const at::NoGradGuard no_grad;
  const at::Tensor values = all.detach();
  return {log_probs, -(values.exp() * values).sum(-1)};
}

int64_t chunk_of(const LogProbOptions& options, int64_t vocabulary) {
  return options.chunk > 0 ? options.chunk : std::max<int64_t>(64, kChunkBytes / 4 / vocabulary);
}

// log_probs_of() without all logits: chunk by chunk, and again in backward.
struct ChunkedLogProbs : torch::autograd::Function<ChunkedLogProbs> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const at::Tensor& hidden, const at::Tensor& weight,
                                                const at::Tensor& targets,
                                                const LogProbOptions& options, int64_t chunk) {
    std::vector<std::vector<at::Tensor>> parts(options.entropy ? 2 : 1);
    for (int64_t begin = 0; begin < hidden.size(0); begin += chunk) {
      const int64_t end = std::min(begin + chunk, hidden.size(0));
      auto made = log_probs_of(at::linear(hidden.slice(0, begin, end), weight),
                               targets.slice(0, begin, end), options);
      for (size_t i = 0; i < parts.size(); ++i) parts[i].push_back(std::move(made[i]));
    }
    context->save_for_backward({hidden, weight, targets});
    context->saved_data["temperature"] = options.temperature;
    context->saved_data["vocabulary"] = options.vocabulary;
    context->saved_data["chunk"] = chunk;
    torch::autograd::variable_list out;
    for (const auto& part : parts) out.push_back(at::cat(part));
    if (options.entropy) context->mark_non_differentiable({out[1]});
    return out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &hidden = saved[0], &weight = saved[1], &targets = saved[2];
    const LogProbOptions options{.temperature = context->saved_data["temperature"].toDouble(),
                                 .vocabulary = context->saved_data["vocabulary"].toInt()};
    const int64_t chunk = context->saved_data["chunk"].toInt();
    // Sums of narrow chunks are in float32.
    const auto wide = weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::AutoGradMode with_gradients(true);
    const at::Tensor w = weight.detach().set_requires_grad(weight.requires_grad());
    std::vector<at::Tensor> d_hidden;
    at::Tensor d_weight;
    for (int64_t begin = 0; begin < hidden.size(0); begin += chunk) {
      const int64_t end = std::min(begin + chunk, hidden.size(0));
      const at::Tensor h = hidden.slice(0, begin, end).detach().set_requires_grad(true);
      const auto made = log_probs_of(at::linear(h, w), targets.slice(0, begin, end), options);
      std::vector<at::Tensor> inputs = {h};
      if (w.requires_grad()) inputs.push_back(w);
      auto of = torch::autograd::grad(made, inputs, {gradients[0].slice(0, begin, end)});
      d_hidden.push_back(std::move(of[0]));
      if (!w.requires_grad()) continue;
      const at::NoGradGuard no_grad;
      d_weight = d_weight.defined() ? d_weight.add_(of[1]) : of[1].to(wide);
    }
    if (d_weight.defined()) d_weight = d_weight.detach().to(weight.scalar_type());
    return {at::cat(d_hidden), d_weight, {}, {}, {}};
  }
};

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

std::vector<int64_t> whole_groups(size_t episodes, int64_t group_size) {
  if (group_size < 1 || static_cast<int64_t>(episodes) % group_size != 0) {
    throw ConfigError(
        fmt::format("[grpo] {} rewards cannot be split into groups of {}", episodes, group_size));
  }
  return std::vector<int64_t>(episodes / static_cast<size_t>(group_size), group_size);
}

std::vector<double> advantages(std::span<const double> rewards, std::span<const int64_t> groups,
                               ScaleRewards scale) {
  const double of_all = scale == ScaleRewards::Batch ? deviation_of(rewards) : 0;
  std::vector<double> out;
  for (const int64_t size : groups) {
    const auto group = rewards.subspan(out.size(), static_cast<size_t>(size));
    const double mean = mean_of(group);
    const double deviation = scale == ScaleRewards::Std ? deviation_of(group) : of_all;
    const double divisor = scale == ScaleRewards::None ? 1 : deviation + kSmallest;
    for (const double reward : group) out.push_back((reward - mean) / divisor);
  }
  return out;
}

std::vector<uint8_t> equal_groups(std::span<const double> rewards,
                                  std::span<const int64_t> groups) {
  std::vector<uint8_t> out;
  size_t at = 0;
  for (const int64_t size : groups) {
    const auto group = rewards.subspan(at, static_cast<size_t>(size));
    const auto [least, most] = std::minmax_element(group.begin(), group.end());
    out.push_back(*most - *least < 1e-9 ? 1 : 0);
    at += group.size();
  }
  return out;
}

std::vector<double> advantages(std::span<const double> rewards, int64_t group_size,
                               ScaleRewards scale) {
  return advantages(rewards, whole_groups(rewards.size(), group_size), scale);
}

std::vector<uint8_t> equal_groups(std::span<const double> rewards, int64_t group_size) {
  return equal_groups(rewards, whole_groups(rewards.size(), group_size));
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
  // What fills up a row after its end is seen by no own token of a causal model.
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
  const at::Tensor targets = tokens.targets.to(device);
  const auto part = [&](const at::Tensor& hidden) -> std::vector<at::Tensor> {
    const at::Tensor own = hidden.flatten(0, 1).index_select(0, tokens.places.to(device));
    const int64_t chunk = chunk_of(options, net->head_weight().size(0));
    if (own.size(0) > chunk) {
      return ChunkedLogProbs::apply(own, net->head_weight(), targets, options, chunk);
    }
    // Not the model's head(), which has another product for a few tokens without gradients: a
    // reference's bits would not be those of the policy that it is.
    return log_probs_of(at::linear(own, net->head_weight()), targets, options);
  };
  auto made = with_hidden(net, tokens.ids.to(device), part);
  return {.log_probs = std::move(made[0]),
          .entropy = options.entropy ? std::move(made[1]) : at::Tensor()};
}

GrpoLoss grpo_loss(const GrpoTokens& tokens, const GrpoOptions& options) {
  if (!(options.beta >= 0 && options.clip_low >= 0 && options.clip_high >= 0) ||
      (options.beta > 0 && !tokens.reference.defined())) {
    throw ConfigError(fmt::format(
        "[grpo] beta = {}, clip-low = {}, clip-high = {}: none may be negative, and a beta needs "
        "the reference's log-probabilities",
        options.beta, options.clip_low, options.clip_high));
  }
  const at::Tensor& now = tokens.log_probs;
  for (const auto* other : {&tokens.old, &tokens.reference, &tokens.advantages, &tokens.weights}) {
    const bool may_lack = other == &tokens.old || other == &tokens.reference;
    if (may_lack && !other->defined()) continue;
    if (other->sizes() == now.sizes()) continue;
    throw ConfigError(fmt::format(
        "[grpo] log-probabilities of {} tokens, and old ones, a reference, advantages or weights "
        "of {}: all need one length",
        now.numel(), other->numel()));
  }
  const at::Tensor old = tokens.old.defined() ? tokens.old : now.detach();
  // Where the cut ratio counts, exp() must not overflow: backward would multiply 0 by infinity.
  const at::Tensor log_ratio = now - old;
  const at::Tensor ratio =
      at::where(tokens.advantages >= 0, log_ratio.clamp_max(80), log_ratio).exp();
  const at::Tensor whole = ratio * tokens.advantages;
  const at::Tensor cut =
      ratio.clamp(1 - options.clip_low, 1 + options.clip_high) * tokens.advantages;
  // At a tie, as at a ratio of 1 with nothing to clip to, the whole gradient is the ratio's;
  // at::min() would halve it.
  at::Tensor each = -at::where(whole <= cut, whole, cut);
  GrpoLoss out;
  out.kl = at::zeros({}, at::dtype(at::kDouble).device(now.device()));
  if (options.beta > 0) {
    const at::Tensor difference = tokens.reference - now;
    const at::Tensor k3 = difference.exp() - difference - 1;
    each = each + options.beta * k3;
    // For logs: near 0 the sum above is the rounding of 1, of either sign.
    const at::Tensor exact = difference.detach().to(at::kDouble);
    out.kl = (exact.expm1() - exact).sum();
  }
  out.loss = (each * tokens.weights).sum();
  const at::Tensor r = ratio.detach();
  const auto count = [](const at::Tensor& where) { return where.sum(at::kDouble); };
  out.clipped_low = count((r < 1 - options.clip_low).logical_and(tokens.advantages < 0));
  out.clipped_high = count((r > 1 + options.clip_high).logical_and(tokens.advantages > 0));
  return out;
}

}  // namespace lockstep::rl
