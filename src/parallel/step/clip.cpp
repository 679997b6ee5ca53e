#include "lockstep/parallel/clip.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "checkpoint/part_of.h"
#include "lockstep/core/error.h"
#include "parallel/ddp/gradients.h"
#include "parallel/ddp/model.h"
#include "parallel/lanes/rules.h"

namespace lockstep::parallel {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor norm_of(const std::vector<at::Tensor>& tensors, double p) {
  if (tensors.empty()) return at::zeros({});
  // Tensors without elements have no largest one.
  std::vector<at::Tensor> filled;
  for (const auto& tensor : tensors) {
    if (tensor.numel() > 0) filled.push_back(tensor);
  }
  std::vector<at::Tensor> norms_of_filled, norms;
  if (!filled.empty()) norms_of_filled = at::_foreach_norm(filled, p);
  auto next = norms_of_filled.begin();
  for (const auto& tensor : tensors) {
    const auto dtype = c10::toRealValueType(tensor.scalar_type());
    norms.push_back(tensor.numel() > 0 ? *next++ : at::zeros({}, tensor.options().dtype(dtype)));
  }
  return at::linalg_vector_norm(at::stack(norms), p);
}

// Shards of an Fsdp have another norm on each rank: clipping by it would silently train something
// else.
void check_parts(const std::vector<at::Tensor>& parameters, const std::optional<Group>& group) {
  for (const auto& parameter : parameters) {
    const auto* const part = checkpoint::part_of(parameter);
    if (part == nullptr || part->ranks == 1) continue;
    const bool has_size = group && group->size() == part->ranks;
    if (has_size && part->is_within(group->world_ranks())) continue;
    throw ConfigError(
        fmt::format("[clip_grad_norm_] parameter '{}' is an Fsdp's part of one, sharded over {} "
                    "ranks, and {}, "
                    "so this would not be the norm of all gradients: call fsdp.clip_grad_norm_()",
                    part->name, part->ranks,
                    has_size ? fmt::format("ClipOptions::group has ranks {} of the world, not {}",
                                           group->world_ranks(), part->world_ranks)
                    : group  ? fmt::format("ClipOptions::group has {}", group->size())
                             : "there is no ClipOptions::group"));
  }
}

// The p-norm of all ranks' vectors laid end to end: the same tensor on all, also on those that have
// no gradients, as float64 where some rank's is.
at::Tensor norm_over(const at::Tensor& mine, double p, const Group& group) {
  const at::Tensor wide = mine.to(at::kDouble);
  const bool is_wide = mine.scalar_type() == at::kDouble;
  at::Tensor told = at::stack({p == kInfinity ? wide : wide.pow(p), at::full_like(wide, is_wide)});
  group
      .all_reduce(told, p == kInfinity ? ReduceOp::Max : ReduceOp::Sum,
                  {.label = "clip_grad_norm_"})
      .wait();
  const at::Tensor sum = told[0];
  return (p == kInfinity ? sum : sum.pow(1 / p))
      .to(told[1].item<double>() > 0 ? at::kDouble : at::kFloat);
}

// The counts of one parameter's gradient as a line; empty when all is finite.
std::string fault(const Named& item, int rank) {
  const at::Tensor values = gradient_values(item.tensor);
  const auto nans = at::isnan(values).sum().item<int64_t>();
  const auto infinities = at::isinf(values).sum().item<int64_t>();
  if (nans + infinities == 0) return {};
  return fmt::format("'{}' on rank {} ({} NaN and {} infinite of {})\n", item.name, rank, nans,
                     infinities, values.numel());
}

}  // namespace

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           const ClipOptions& options) {
  if (!(options.norm_type > 0) || !(max_norm >= 0)) {
    throw ConfigError(
        fmt::format("[clip_grad_norm_] max_norm = {} and norm_type = {}: the first must not be "
                    "below, the second "
                    "must be above 0 (infinity for the largest magnitude)",
                    max_norm, options.norm_type));
  }
  check_parts(parameters, options.group);
  const at::NoGradGuard no_grad;
  const auto gradients = gradients_of(parameters);
  at::Tensor norm = norm_of(gradients, options.norm_type);
  if (options.group) refuse_lanes(*options.group, "clip", "leave out ClipOptions::group");
  if (options.group) norm = norm_over(norm, options.norm_type, *options.group);
  if (options.error_if_nonfinite && !std::isfinite(norm.item<double>())) {
    throw Error(
        fmt::format("[clip_grad_norm_] the gradients' norm is {}, so they were left as they were: "
                    "check_finite() "
                    "names the parameters; a lower learning rate or loss scale may help",
                    norm.item<double>()));
  }
  // As Python rounds max_norm / (norm + 1e-6).
  const at::Tensor factor = ((norm + 1e-6).reciprocal() * max_norm).clamp_max(1.0);
  // Looking costs nothing on a CPU, and saves writing all gradients; a device would have to be
  // waited for.
  const bool unchanged = factor.is_cpu() && factor.item<double>() == 1;
  if (!gradients.empty() && !unchanged) at::_foreach_mul_(gradients, factor);
  return norm;
}

void clip_grad_value_(const std::vector<at::Tensor>& parameters, double max_value) {
  if (!(max_value >= 0)) {
    throw ConfigError(
        fmt::format("[clip_grad_value_] max_value = {}: it must not be below 0", max_value));
  }
  const at::NoGradGuard no_grad;
  const auto gradients = gradients_of(parameters);
  if (gradients.empty()) return;
  for (const auto& gradient : gradients) {
    if (!gradient.is_complex()) continue;
    throw ConfigError(
        "[clip_grad_value_] a gradient is complex, and complex numbers have no order: "
        "clip_grad_norm_ "
        "scales them");
  }
  at::_foreach_clamp_min_(gradients, -max_value);
  at::_foreach_clamp_max_(gradients, max_value);
}

void check_finite(const ModuleRef& module, const Group& group) {
  const at::NoGradGuard no_grad;
  const Model model = Model::of(module);
  std::vector<at::Tensor> parameters;
  for (const auto& item : model.parameters) parameters.push_back(item.tensor);
  // The largest magnitude is NaN where a NaN is, and does not overflow. On CPUs the 2-norm takes a
  // fifteenth of the time, and is finite only where all is.
  const auto gradients = gradients_of(parameters);
  const bool on_cpu = std::ranges::all_of(gradients, &at::Tensor::is_cpu);
  at::Tensor norm = norm_of(gradients, on_cpu ? 2 : kInfinity);
  if (on_cpu && !std::isfinite(norm.item<double>())) norm = norm_of(gradients, kInfinity);
  at::Tensor finite = at::isfinite(norm).reshape({1}).to(at::kInt);
  group.all_reduce(finite, ReduceOp::Min, {.label = "check_finite"}).wait();
  if (finite.item<int>() != 0) return;
  std::string faults;
  for (const auto& item : model.parameters) {
    if (item.tensor.grad().defined()) faults += fault(item, group.rank());
  }
  const auto all = group.all_gather_bytes(faults, {.label = "check_finite"});
  throw Error(fmt::format(
      "[check_finite] gradients are not finite:\n{}skip this step, or lower the learning rate or "
      "loss scale",
      fmt::join(all, "")));
}

}  // namespace lockstep::parallel
