#include "lockstep/parallel/grad_scaler.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/optim/lbfgs.h>

#include "checkpoint/part_of.h"
#include "lockstep/core/error.h"
#include "parallel/ddp/gradients.h"
#include "parallel/ddp/reducer/accumulator.h"
#include "parallel/layout/flat_memory.h"

namespace lockstep::parallel {
namespace {

[[noreturn]] void misused(std::string_view method, std::string_view why) {
  throw ConfigError(fmt::format("[grad_scaler] {}: {}", method, why));
}

void check_options(const GradScalerOptions& o) {
  const bool good = o.init_scale > 0 && o.growth_interval > 0 && o.growth_factor > 1 &&
                    o.backoff_factor > 0 && o.backoff_factor < 1;
  if (good) return;
  throw ConfigError(
      fmt::format("[grad_scaler] init_scale = {}, growth_factor = {}, backoff_factor = {}, "
                  "growth_interval = {}: need "
                  "above 0, above 1, between 0 and 1, above 0",
                  o.init_scale, o.growth_factor, o.backoff_factor, o.growth_interval));
}

// Of an Fsdp's parts each rank sees its own overflows only.
void check_part(const at::Tensor& parameter, const Group& group) {
  const auto* const part = checkpoint::part_of(parameter);
  if (part == nullptr || part->ranks == 1) return;
  const bool has_size = part->ranks <= group.size();
  if (has_size && part->is_within(group.world_ranks())) return;
  misused("unscale_",
          fmt::format("parameter '{}' is an Fsdp's part of one, sharded over {} ranks, and the "
                      "scaler's group has {}: after an overflow in one rank's parts the others "
                      "would step: GradScaler scaler(world)",
                      part->name, part->ranks,
                      has_size ? fmt::format("ranks {} of the world, not {}", group.world_ranks(),
                                             part->world_ranks)
                               : fmt::format("{}", group.size())));
}

std::map<at::ScalarType, std::vector<at::Tensor>> by_dtype(torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups()) {
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  }
  std::map<at::ScalarType, std::vector<at::Tensor>> gradients;
  for (auto& gradient : gradients_of(parameters)) {
    if (gradient.scalar_type() == at::kHalf) {
      misused("unscale_",
              "a gradient is float16, and would lose what scaling saved: keep the parameters "
              "in float32 and let Autocast narrow them");
    }
    // libtorch unscales no complex numbers.
    const at::Tensor values = as_reals(gradient);
    gradients[values.scalar_type()].push_back(values);
  }
  return gradients;
}

// Where its gradients are, on all ranks, also on one that has none in this step.
at::Device device_of(const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    if (!group.params().empty()) return group.params().front().device();
  }
  return at::kCPU;
}

}  // namespace

GradScaler::GradScaler(const Group& group, const GradScalerOptions& options)
    : group_(group), options_(options), initial_{.scale = options.init_scale, .growth_tracker = 0} {
  group.refuse_python_ranks("GradScaler over a group");
  check_options(options);
}

void GradScaler::place_on(at::Device device) {
  scale_ = at::full({}, initial_.scale, at::TensorOptions(device).dtype(at::kFloat));
  growth_tracker_ =
      at::full({}, initial_.growth_tracker, at::TensorOptions(device).dtype(at::kInt));
}

at::Tensor GradScaler::scale(const at::Tensor& loss) {
  if (!options_.enabled) return loss;
  if (!scale_.defined()) place_on(loss.device());
  // A tensor with dimensions would stay in its dtype, in which the product may be infinite.
  return loss.to(at::promote_types(loss.scalar_type(), at::kFloat)) * scale_;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return;
  if (!scale_.defined() && group_.size() == 1) {
    misused("unscale_", "scale() comes first, for the loss");
  }
  if (const auto found = optimizers_.find(&optimizer); found != optimizers_.end()) {
    misused("unscale_", found->second.stage == Stage::Unscaled
                            ? "already called for this optimizer since the last update()"
                            : "called after step(): update() comes first");
  }
  const at::NoGradGuard no_grad;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) check_part(parameter, group_);
  }
  const auto gradients = by_dtype(optimizer);
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      if (const auto hook = hook_of(parameter)) hooks_[hook.get()] = hook;
    }
  }
  // Within a Join a rank may have had no loss so far.
  const bool scaled = scale_.defined();
  // Not the loss's, where an Fsdp keeps its shards in the host's memory.
  const at::Device device = device_of(optimizer);
  const at::Tensor scale =
      scaled ? scale_.to(device)
             : at::full({}, initial_.scale, at::TensorOptions(device).dtype(at::kFloat));
  const at::Tensor inverse = scale.to(at::kDouble).reciprocal().to(at::kFloat);
  at::Tensor overflow = at::zeros({1}, scale.options());
  for (const auto& [dtype, list] : gradients) {
    at::_amp_foreach_non_finite_check_and_unscale_(list, overflow,
                                                   scaled ? inverse : at::ones_like(inverse));
  }
  if (group_.size() > 1) {
    at::Tensor both = at::cat({overflow, at::full({1}, scaled ? 1.0 : 0.0, overflow.options())});
    group_.all_reduce(both, ReduceOp::Max, {.label = "GradScaler overflow"}).wait();
    if (!scaled && both[1].item<float>() == 0) {
      misused("unscale_", "scale() comes first, for the loss, and no rank has called it");
    }
    overflow = both.narrow(0, 0, 1).clone();
  }
  if (!scaled) {
    place_on(scale.device());
    at::Tensor ignored = at::zeros_like(overflow);
    for (const auto& [dtype, list] : gradients) {
      at::_amp_foreach_non_finite_check_and_unscale_(list, ignored, inverse);
    }
  }
  optimizers_[&optimizer] = {Stage::Unscaled, overflow};
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (options_.enabled && dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr) {
    misused("step",
            "LBFGS evaluates the loss several times a step, and its line search would meet scaled "
            "ones: train with it in float32 or bfloat16, without a scaler");
  }
  if (!options_.enabled) {
    optimizer.step();
    return true;
  }
  const auto found = optimizers_.find(&optimizer);
  if (found == optimizers_.end()) {
    unscale_(optimizer);
  } else if (found->second.stage == Stage::Stepped) {
    misused("step", "already called for this optimizer since the last update()");
  }
  PerOptimizer& mine = optimizers_.at(&optimizer);
  const bool steps = mine.overflow.item<float>() == 0;
  if (steps) optimizer.step();
  mine.stage = Stage::Stepped;
  return steps;
}

void GradScaler::update() {
  if (!options_.enabled) return;
  if (optimizers_.empty()) misused("update", "no step() since the last one");
  at::Tensor overflow = at::zeros_like(scale_);
  for (const auto& [optimizer, each] : optimizers_) {
    overflow += each.overflow.squeeze(0).to(overflow.device());
  }
  std::erase_if(hooks_, [](const auto& item) { return item.second.expired(); });
  // Looking waits for a device, so it is done for hooks only.
  const double before = hooks_.empty() ? 1 : factor();
  at::_amp_update_scale_(scale_, growth_tracker_, overflow, options_.growth_factor,
                         options_.backoff_factor, options_.growth_interval);
  const double after = hooks_.empty() ? 1 : factor();
  if (after != before) {
    const at::NoGradGuard no_grad;
    for (const auto& [address, hook] : hooks_) hook.lock()->rescale(after / before);
  }
  optimizers_.clear();
}

double GradScaler::factor() const {
  if (!options_.enabled) return 1.0;
  return scale_.defined() ? scale_.item<double>() : initial_.scale;
}

GradScalerState GradScaler::state() const {
  if (!scale_.defined()) return initial_;
  return {.scale = scale_.item<double>(), .growth_tracker = growth_tracker_.item<int64_t>()};
}

void GradScaler::restore(const GradScalerState& state) {
  if (!(state.scale > 0) || state.growth_tracker < 0) {
    throw ConfigError(
        fmt::format("[grad_scaler] restore: scale = {}, growth_tracker = {}: not a state of one",
                    state.scale, state.growth_tracker));
  }
  initial_ = state;
  optimizers_.clear();
  if (scale_.defined()) place_on(scale_.device());
}

}  // namespace lockstep::parallel
