#include "random/changes/net.h"

#include <fmt/format.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <algorithm>

#include "lockstep/parallel/call.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/fused_sgd.h"

namespace lockstep::test::changes {
namespace {

constexpr int64_t kFeatures = 6;
// A weight has more than the 1,024 elements at which a ZeroOptimizer cuts.
constexpr int64_t kHidden = 200;

at::Tensor drawn_tensor(uint64_t seed, at::IntArrayRef sizes, double scale) {
  const auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, generator, at::kDouble) * scale;
}

}  // namespace

LayerImpl::LayerImpl(int64_t in, int64_t out, uint64_t seed)
    : weight(register_parameter("weight", drawn_tensor(seed, {out, in}, 0.1))),
      bias(register_parameter("bias", drawn_tensor(seed + 1, {out}, 0.1))) {}

void LayerImpl::tie_weight(const at::Tensor& other) { parameters_["weight"] = weight = other; }

Layer up_layer(uint64_t seed) { return Layer(kFeatures, kHidden, seed); }

BlockImpl::BlockImpl(uint64_t seed)
    : up(register_module("up", up_layer(seed))),
      down(register_module("down", Layer(kHidden, kFeatures, seed + 7))) {}

NetImpl::NetImpl(const Course& course, uint64_t seed) {
  for (uint64_t i = 0; i < kBlocks; ++i) {
    blocks.push_back(register_module(fmt::format("block{}", i), Block(mixed(seed, i))));
  }
  seen = register_buffer("seen", at::zeros({3}, at::kDouble));
  if (course.normalized) {
    norm = register_module("norm", torch::nn::BatchNorm1d(kFeatures));
    norm->to(at::kDouble);
  }
  for (const int block : course.frozen) set_trainable(block, false);
}

at::Tensor NetImpl::forward(at::Tensor x) {
  seen.copy_(seen_after(seen, x));
  if (norm) x = norm(x);
  for (int i = 0; i < kBlocks; ++i) {
    if (!skipped.contains(i)) x = lockstep::call(blocks[static_cast<size_t>(i)], x);
  }
  if (noise) x = x * (noise(x.sizes()) < 0.75) / 0.75;
  // Not their plain sum: gradients of the last bias would be equal, of which TopK chooses by
  // roundings, and those of the last weight a matrix of rank 1, of which PowerSgd's second
  // direction may be roundings alone.
  return (x + 0.1 * x.square()).sum(1);
}

at::Tensor seen_after(const at::Tensor& seen, const at::Tensor& x) {
  return seen * 0.5 + x.detach().narrow(1, 0, seen.numel()).mean(0);
}

void NetImpl::set_trainable(int block, bool trainable) {
  for (const auto& parameter : blocks[static_cast<size_t>(block)]->parameters()) {
    parameter.set_requires_grad(trainable);
  }
}

void NetImpl::take(const Course& course, const Change& change) {
  BlockImpl& block = *blocks[static_cast<size_t>(change.block)];
  const BlockImpl& other = *blocks[static_cast<size_t>(change.other)];
  switch (change.what) {
    case What::Freeze:
    case What::Thaw:
      return set_trainable(change.block, change.what == What::Thaw);
    case What::Replace:
      block.up = block.replace_module("up", up_layer(mixed(course.seed, 200 + change.step)));
      return;
    case What::Tie:
      block.up = block.replace_module("up", other.up);
      return;
    case What::TieWeight:
      return block.up->tie_weight(other.up->weight);
    case What::Skip:
      if (!skipped.erase(change.block)) skipped.insert(change.block);
      return;
    default:
      return;
  }
}

std::vector<std::shared_ptr<torch::nn::Module>> models_of(const Net& net, int count) {
  if (count == 1) return {net.ptr()};
  std::vector<std::shared_ptr<torch::nn::Module>> models;
  for (int model = 0; model < count; ++model) {
    auto& part = models.emplace_back(std::make_shared<torch::nn::Module>());
    for (int block = model * kBlocks / count; block < (model + 1) * kBlocks / count; ++block) {
      part->register_module(fmt::format("block{}", block), net->blocks[static_cast<size_t>(block)]);
    }
  }
  models[0]->register_buffer("seen", net->seen);
  if (net->norm) models[0]->register_module("norm", net->norm);
  return models;
}

Named parameters_of(const NetImpl& net) {
  Named once;
  for (const auto& item : net.named_parameters()) {
    const auto is_it = [&](const auto& other) { return other.second.is_same(item.value()); };
    if (std::ranges::none_of(once, is_it)) once.emplace_back(item.key(), item.value());
  }
  return once;
}

Groups groups_of(const Course& course) {
  Groups groups(static_cast<size_t>(course.optimizers));
  for (int block = 0; block < kBlocks; ++block) {
    if (std::ranges::count(course.late, block) > 0) continue;
    groups[static_cast<size_t>(block % course.optimizers)].push_back(block);
  }
  return groups;
}

void change_groups(const Course& course, const Change& change, Groups& groups) {
  if (change.what == What::AddGroup) {
    for (const auto& group : groups) {
      if (std::ranges::count(group, change.block) > 0) return;
    }
    groups.push_back({change.block});
  }
  const bool is_added = std::ssize(groups) > course.optimizers;
  if (change.what == What::DropGroup && is_added) groups.pop_back();
}

std::vector<Named> members_of(const NetImpl& net, const Groups& groups) {
  const Named all = parameters_of(net);
  std::set<std::string> taken;
  std::vector<Named> members;
  for (const auto& blocks : groups) {
    Named& group = members.emplace_back();
    const auto add = [&](const at::Tensor& own) {
      for (const auto& [name, parameter] : all) {
        if (parameter.is_same(own) && taken.insert(name).second) group.emplace_back(name, own);
      }
    };
    for (const int block : blocks) {
      for (const auto& own : net.blocks[static_cast<size_t>(block)]->parameters()) add(own);
    }
    if (&blocks == groups.data() && net.norm) {
      for (const auto& own : net.norm->parameters()) add(own);
    }
  }
  return members;
}

double rate_of(const std::string& optimizer) {
  return optimizer.ends_with("sgd") ? 1e-4 : optimizer == "rmsprop" ? 1e-3 : 1e-2;
}

std::unique_ptr<Optimizer> made(const std::string& name, std::vector<OptimizerParamGroup> groups) {
  using namespace torch::optim;
  const double rate = rate_of(name);
  const auto sgd = SGDOptions(rate).momentum(0.9).weight_decay(0.1);
  const auto adamw = AdamWOptions(rate).eps(1e-3).weight_decay(0.1);
  if (name == "sgd") return std::make_unique<SGD>(std::move(groups), sgd);
  if (name == "adam") {
    return std::make_unique<Adam>(std::move(groups), AdamOptions(rate).eps(1e-3));
  }
  if (name == "adamw") return std::make_unique<AdamW>(std::move(groups), adamw);
  if (name == "rmsprop") {
    const auto options = RMSpropOptions(rate).eps(1e-3).momentum(0.5).weight_decay(0.1);
    return std::make_unique<RMSprop>(std::move(groups), options);
  }
  if (name == "fused_sgd") return std::make_unique<parallel::FusedSGD>(std::move(groups), sgd);
  return std::make_unique<parallel::FusedAdamW>(std::move(groups), adamw);
}

OptimizerParamGroup group_of(const Named& members) {
  std::vector<at::Tensor> parameters;
  for (const auto& [name, parameter] : members) parameters.push_back(parameter);
  return OptimizerParamGroup(std::move(parameters));
}

void give_members(Optimizer& optimizer, const std::vector<Named>& now) {
  auto& groups = optimizer.param_groups();
  std::set<const void*> kept;
  for (size_t i = 0; i < now.size(); ++i) {
    const OptimizerParamGroup made = group_of(now[i]);
    for (const auto& parameter : made.params()) kept.insert(parameter.unsafeGetTensorImpl());
    i < groups.size() ? static_cast<void>(groups[i].params() = made.params())
                      : optimizer.add_param_group(made);
  }
  while (groups.size() > now.size()) groups.pop_back();
  std::vector<void*> gone;
  for (const auto& item : optimizer.state()) {
    if (!kept.contains(item.first)) gone.push_back(item.first);
  }
  for (void* parameter : gone) optimizer.state().erase(parameter);
}

std::pair<at::Tensor, at::Tensor> samples_of(uint64_t seed) {
  return {drawn_tensor(mixed(seed, 100), {kEpoch, kFeatures}, 1),
          drawn_tensor(mixed(seed, 101), {kEpoch}, 1)};
}

std::pair<at::Tensor, at::Tensor> batch_of(uint64_t seed, int step, int rank) {
  const uint64_t own = mixed(seed, 300 + static_cast<uint64_t>(step), static_cast<uint64_t>(rank));
  return {drawn_tensor(own, {5, kFeatures}, 1), drawn_tensor(own + 1, {5}, 1)};
}

std::string difference(const Named& got, const Named& want, double tolerance) {
  if (got.size() != want.size()) return fmt::format("{} values, want {}", got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const auto& [name, a] = got[i];
    const auto& [other, b] = want[i];
    if (name != other || a.sizes() != b.sizes()) return name + " in the place of " + other;
    if (at::allclose(a, b, tolerance, tolerance, /*equal_nan=*/true)) continue;
    const auto gap = (a - b).abs().max();
    return fmt::format("{} differs by {}", name, gap.item().toDouble());
  }
  return {};
}

std::string bytes_of(const Named& state) {
  std::string bytes;
  for (const auto& [name, tensor] : state) {
    const auto whole = tensor.contiguous();
    bytes.append(static_cast<const char*>(whole.const_data_ptr()), whole.nbytes());
  }
  return bytes;
}

}  // namespace lockstep::test::changes
