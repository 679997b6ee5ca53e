#include "lockstep/rl/learner.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <optional>

#include "core/divided_up.h"
#include "lockstep/core/error.h"
#include "lockstep/models/cross_entropy.h"
#include "lockstep/parallel/activation_checkpointing.h"
#include "lockstep/parallel/clip.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fsdp.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/stateful.h"
#include "parallel/ddp/reducer/objection.h"
#include "rl/policy/agreed.h"
#include "rl/policy/with_hidden.h"

namespace lockstep::rl {
namespace {

// A lane without tokens contributes zeros to the step.
at::Tensor zero_loss(models::Transformer& net) {
  const at::Tensor ids =
      at::zeros({1, 1}, at::dtype(at::kLong).device(net->head_weight().device()));
  return with_hidden(net, ids, [&](const at::Tensor& hidden) -> std::vector<at::Tensor> {
    return {net->head(hidden).sum() * 0};
  })[0];
}

// Blocks are gathered one by one where the model is sharded.
parallel::FsdpOptions division_of(const models::Transformer& net, const LearnerOptions& options,
                                  parallel::Sharding sharding) {
  parallel::FsdpOptions out{.units = parallel::units_of<models::TransformerBlockImpl>(*net),
                            .sharding = sharding};
  if (options.narrow) out.param_dtype = at::kBFloat16;
  return out;
}

// What one lane learns from.
struct LaneBatch {
  OwnTokens tokens;
  at::Tensor advantages, weights, reference, old;
};

void check(const LearnerOptions& options) {
  if (options.updates < 1 || options.lanes < 1 || options.group_size < 1) {
    throw ConfigError(fmt::format("[learner] updates = {}, lanes = {}, group-size = {}: above 0",
                                  options.updates, options.lanes, options.group_size));
  }
  if (options.reference == ReferencePlace::Sharded && !options.divided) {
    throw ConfigError("[learner] the reference is sharded where the policy is: set divided, too");
  }
}

}  // namespace

struct Learner::State {
  State(const models::Transformer& given, const comm::Group& of, LearnerOptions o)
      : options(std::move(o)), group(of), net(given) {
    check(options);
    if (options.use_grpo && options.grpo.beta > 0) make_reference();
    if (options.divided || options.narrow) {
      auto division = division_of(
          net, options, options.divided ? parallel::Sharding::Full : parallel::Sharding::None);
      division.lanes = options.lanes;
      fsdp.emplace(net, group, std::move(division));
    } else {
      ddp.emplace(*net, group, parallel::DdpOptions{.lanes = options.lanes});
    }
    if (options.divided) recomputed.emplace(net->recomputed(models::Recomputed::Full));
    own_lanes = Shard{group.rank(), group.size()}.of(options.lanes).size();
    most_lanes = divided_up(options.lanes, group.size());
    adam = std::make_unique<parallel::FusedAdamW>(
        parameters(),
        torch::optim::AdamWOptions(options.learning_rate).betas({0.9, 0.95}).weight_decay(0.01));
    copy_reference();
  }

  void make_reference() {
    reference = models::Transformer(net->options);
    reference->to(net->head_weight().device());
    if (options.narrow) reference->to(at::kBFloat16);
    reference->eval();
    for (auto& parameter : reference->parameters()) parameter.set_requires_grad(false);
    copy(net->parameters(), reference->parameters());
    if (options.reference == ReferencePlace::Resident) return;
    auto division = division_of(reference, options, parallel::Sharding::Full);
    if (options.reference == ReferencePlace::Offloaded) {
      const bool in_files = net->head_weight().device().is_cpu();
      division.offload = in_files ? parallel::Offload::File : parallel::Offload::Cpu;
      if (in_files) division.offload_folder = options.reference_folder;
    }
    reference_fsdp.emplace(reference, group, std::move(division));
  }

  // What the optimizer updates: of this rank.
  std::vector<at::Tensor> parameters() const {
    return fsdp ? fsdp->parameters() : net->parameters();
  }

  static void copy(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to) {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i].view_as(to[i]));
  }

  // This rank's parts of whole parameters.
  static void copy_parts(const std::vector<at::Tensor>& from,
                         const std::vector<parallel::FsdpShard>& to) {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < from.size(); ++i) {
      at::Tensor part = to[i].shard;
      part.copy_(from[i].flatten().narrow(0, to[i].begin, part.numel()));
    }
  }

  void copy_reference() {
    if (!reference) return;
    if (options.divided && !reference_fsdp) {
      fsdp->unshard();
      copy(net->parameters(), reference->parameters());
      fsdp->reshard();
    } else if (!options.divided && reference_fsdp) {
      copy_parts(parameters(), reference_fsdp->shards());
    } else {
      copy(parameters(), reference_fsdp ? reference_fsdp->parameters() : reference->parameters());
    }
  }

  // Lanes that another number of them would leave out, or not find, are refused on all ranks.
  void check_lanes(const Rollout& rollout) const {
    parallel::Objection objection;
    objection.add(misfit(rollout, own_lanes, options.lanes));
    objection.refuse(group, "learner", {.label = "lanes"});
  }

  // The reference's log-probabilities of a lane, where it has tokens. Ranks that gather its units
  // call it equally often.
  at::Tensor of_reference(const OwnTokens& tokens) {
    const at::NoGradGuard no_grad;
    if (!tokens.lengths.empty()) {
      return own_log_probs(reference, tokens, options.log_probs).log_probs;
    }
    if (reference_fsdp) zero_loss(reference);
    return {};
  }

  // Each lane's, of this rank.
  void ask_reference(std::vector<LaneBatch>& batches) {
    if (!reference) return;
    const auto begin = std::chrono::steady_clock::now();
    for (auto& batch : batches) batch.reference = of_reference(batch.tokens);
    for (int64_t lane = own_lanes; lane < most_lanes; ++lane) of_reference({});
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    reference_seconds += taken.count();
  }

  void zero_grad() { fsdp ? fsdp->zero_grad() : ddp->zero_grad(); }
  auto lanes(const parallel::StepKey& key) const {
    return fsdp ? fsdp->lanes(key) : ddp->lanes(key);
  }
  parallel::LaneMean lane_mean() const {
    return fsdp ? parallel::LaneMean(*fsdp) : parallel::LaneMean(*ddp);
  }
  // The gradient's norm. Throws Error for one that is not finite, with what may help.
  double clip(int64_t step, const char* advice) {
    const double most = options.max_grad_norm;
    const auto norm =
        (fsdp ? fsdp->clip_grad_norm_(most) : parallel::clip_grad_norm_(net->parameters(), most))
            .item<double>();
    if (std::isfinite(norm)) return norm;
    throw Error(fmt::format("[learner] step {}: the gradient's norm is {}; {} may help", step, norm,
                            advice));
  }

  LearnerOptions options;
  comm::Group group;
  models::Transformer net;
  models::Transformer reference{nullptr};
  int64_t own_lanes = 0, most_lanes = 0;  // of this rank, and of any
  // One of them is attached to the net.
  std::optional<parallel::Ddp> ddp;
  std::optional<parallel::Fsdp> fsdp, reference_fsdp;
  std::optional<parallel::ActivationCheckpointing> recomputed;  // blocks of a sharded net
  std::unique_ptr<parallel::FusedAdamW> adam;
  double reference_seconds = 0;
};

Learner::Learner(const models::Transformer& net, const comm::Group& group, LearnerOptions options)
    : state_(std::make_unique<State>(net, group, std::move(options))) {}

Learner::~Learner() = default;

void Learner::set_reference() { state_->copy_reference(); }

void Learner::renew_optimizer(double learning_rate) {
  state_->adam->state().clear();  // a Checkpointer keeps the optimizer itself
  set_learning_rate(learning_rate);
}

void Learner::set_learning_rate(double rate) {
  for (auto& group : state_->adam->param_groups()) group.options().set_lr(rate);
}

void Learner::unshard() {
  if (state_->fsdp) state_->fsdp->unshard();
}

void Learner::reshard() {
  if (state_->fsdp) state_->fsdp->reshard();
}

void Learner::track_net(checkpoint::Checkpointer& checkpoints) {
  if (state_->fsdp) {
    checkpoints.track("net", *state_->fsdp);
  } else {
    checkpoints.track("net", state_->net);
  }
}

void Learner::track(checkpoint::Checkpointer& checkpoints) {
  track_net(checkpoints);
  checkpoints.track("adam", *state_->adam);
  if (state_->reference_fsdp) {
    checkpoints.track("reference", *state_->reference_fsdp);
  } else if (state_->reference) {
    checkpoints.track("reference", state_->reference);
  }
}

double Learner::reference_seconds() const { return state_->reference_seconds; }

uint64_t Learner::fingerprint() {
  return state_->fsdp ? state_->fsdp->fingerprint() : state_->ddp->fingerprint();
}

namespace {

LaneBatch batch_of(const Rollout& rollout, size_t own_lane, const Agreed& agreed,
                   const LearnerOptions& options) {
  std::vector<const models::DialogueTokens*> dialogues;
  std::vector<double> of_dialogue;
  for (size_t i = 0; i < rollout.numbers[own_lane].size(); ++i) {
    const size_t number = rollout.numbers[own_lane][i];
    if (agreed.kept[number] == 0) continue;
    dialogues.push_back(&rollout.episodes[own_lane][i].tokens);
    of_dialogue.push_back(agreed.advantages[number]);
  }
  LaneBatch out;
  if (dialogues.empty()) return out;
  out.tokens = own_tokens(dialogues);
  std::vector<float> each;
  for (size_t i = 0; i < of_dialogue.size(); ++i) {
    each.insert(each.end(), static_cast<size_t>(out.tokens.lengths[i]),
                static_cast<float>(of_dialogue[i]));
  }
  out.advantages = at::tensor(each, at::kFloat);
  const auto weights = token_weights(
      out.tokens.lengths, options.use_grpo ? options.norm : LossNorm::Token, agreed.counts);
  out.weights = at::tensor(weights, at::kFloat);
  return out;
}

}  // namespace

Learnt Learner::learn(const Rollout& rollout, int64_t step) {
  auto& s = *state_;
  const auto& o = s.options;
  Learnt learnt;
  if (!rollout.held.empty() && !s.reference) {
    throw ConfigError("[learner] nothing holds an episode without GRPO, or with beta 0");
  }
  s.check_lanes(rollout);
  const Agreed agreed = agree(rollout, o, learnt);
  if (agreed.counts.tokens == 0) return learnt;
  std::vector<LaneBatch> batches;
  for (size_t own = 0; own < rollout.numbers.size(); ++own) {
    batches.push_back(batch_of(rollout, own, agreed, o));
  }
  s.ask_reference(batches);
  auto kl = s.lane_mean(), entropy = s.lane_mean(), low = s.lane_mean(), high = s.lane_mean();
  const auto on = s.net->head_weight().device();
  for (int64_t update = 0; update < o.updates; ++update) {
    s.zero_grad();
    size_t own = 0;
    for (const auto lane : s.lanes({.seed = o.seed, .step = step * o.updates + update})) {
      auto& batch = batches.at(own++);
      if (batch.tokens.lengths.empty()) {
        zero_loss(s.net).backward();
        continue;
      }
      auto options = o.log_probs;
      options.entropy = true;
      const auto now = own_log_probs(s.net, batch.tokens, options);
      const auto count = now.log_probs.size(0);
      entropy.add(now.entropy.sum(at::kDouble), count);
      // Ddp divides by the number of lanes, the weights already by what the whole batch has.
      const auto factor = static_cast<double>(lane.count);
      if (!o.use_grpo) {
        (-(now.log_probs * batch.weights.to(on)).sum() * factor).backward();
        continue;
      }
      if (o.updates > 1 && !batch.old.defined()) batch.old = now.log_probs.detach();
      const auto loss = grpo_loss({.log_probs = now.log_probs,
                                   .old = batch.old,
                                   .reference = batch.reference,
                                   .advantages = batch.advantages.to(on),
                                   .weights = batch.weights.to(on)},
                                  o.grpo);
      kl.add(loss.kl, count);
      low.add(loss.clipped_low, count);
      high.add(loss.clipped_high, count);
      (loss.loss * factor).backward();
    }
    learnt.gradient_norm = s.clip(step, "a lower learning rate, or a closer look at the rewards,");
    s.adam->step();
  }
  learnt.updated = true;
  learnt.entropy = entropy.mean();
  if (o.use_grpo) {
    learnt.kl = kl.mean();
    learnt.clipped_low = low.mean();
    learnt.clipped_high = high.mean();
  }
  return learnt;
}

double Learner::imitate(const std::vector<std::vector<const models::DialogueTokens*>>& lanes,
                        int64_t tokens, int64_t step) {
  auto& s = *state_;
  if (std::ssize(lanes) != s.own_lanes) {
    throw ConfigError(fmt::format("[learner] imitate: batches of {} lanes; this rank has {} of {}",
                                  lanes.size(), s.own_lanes, s.options.lanes));
  }
  s.zero_grad();
  auto mean = s.lane_mean();
  size_t own = 0;
  for (const auto lane : s.lanes({.seed = s.options.seed, .step = step})) {
    const auto& dialogues = lanes.at(own++);
    const OwnTokens batch = own_tokens(dialogues);
    if (batch.targets.size(0) == 0) {
      zero_loss(s.net).backward();
      continue;
    }
    const auto device = s.net->head_weight().device();
    const auto part = [&](const at::Tensor& hidden) -> std::vector<at::Tensor> {
      const at::Tensor before = hidden.flatten(0, 1).index_select(0, batch.places.to(device));
      return {models::cross_entropy(before, s.net->head_weight(), batch.targets.to(device),
                                    {.mean = false})};
    };
    const at::Tensor sum = with_hidden(s.net, batch.ids.to(device), part)[0];
    mean.add(sum.detach(), batch.targets.size(0));
    (sum * (static_cast<double>(lane.count) / static_cast<double>(tokens))).backward();
  }
  s.clip(step, "a lower learning rate");
  s.adam->step();
  return mean.mean();
}

}  // namespace lockstep::rl
