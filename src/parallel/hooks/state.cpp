#include "parallel/hooks/state.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/types.h>

#include <algorithm>
#include <limits>

#include "comm/transport.h"
#include "lockstep/core/error.h"
#include "parallel/layout/flat_memory.h"

namespace lockstep::parallel {
namespace {

// "error/" of "error/first.weight"; nothing where names are plain.
std::string_view family(std::string_view name) { return name.substr(0, name.find('/') + 1); }

bool is_finite(const at::Tensor& tensor) {
  return tensor.numel() == 0 || at::isfinite(tensor).all().item<bool>();
}

}  // namespace

void refuse_state(std::string_view hook, const std::string& why) {
  throw ConfigError(fmt::format(
      "[{}] restore: {}: restore what state() of such a hook gave on this rank, for this model",
      hook, why));
}

void HookState::begin(const Bucket& bucket) {
  if (bucket.index != 0) return;
  restored_ = false;
  staged_.clear();
  replaced_.clear();
  finite_.reset();
}

at::Tensor HookState::of(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? at::Tensor() : found->second;
}

void HookState::settle(const Bucket& bucket) {
  if (bucket.flat.numel() > 0) {
    const at::Tensor finite =
        at::isfinite(at::linalg_vector_norm(bucket.flat, std::numeric_limits<double>::infinity()));
    finite_ = finite_.defined() ? at::logical_and(finite_, finite) : finite;
  }
  if (!bucket.last) return;
  // Nothing waits for a device.
  const bool on_cpu = !finite_.defined() || finite_.is_cpu();
  const bool accepted = !on_cpu || !finite_.defined() || finite_.item<bool>();
  for (auto& [name, next] : staged_) {
    if (!accepted) break;
    at::Tensor& current = tensors_[name];
    replaced_[name] = current;
    if (on_cpu) {
      current = std::move(next);
      continue;
    }
    if (!current.defined()) current = at::zeros_like(next);
    current = at::where(finite_, next, current);
  }
  staged_.clear();
  finite_.reset();
}

void HookState::revert(const std::string& name, const at::Tensor& first) {
  const auto found = replaced_.find(name);
  if (found == replaced_.end()) return;
  tensors_[name] = found->second.defined() ? found->second : first;
}

void HookState::rescale(double factor) {
  // A residual that became infinite is dropped; otherwise it would be added to every later
  // gradient.
  for (auto& [name, tensor] : tensors_) tensor = at::nan_to_num(tensor * factor, 0, 0, 0);
}

void HookState::attach(Layout layout) {
  if (!attached_) check_layout(tensors_, layout);
  const auto place = [](const Layout::value_type& item) {
    return std::pair(item.second.parameter._unsafe_get_target(), family(item.first));
  };
  std::map<decltype(place(*layout.begin())), std::string> before;  // the names
  for (const auto& item : layout_) before.try_emplace(place(item), item.first);
  // Of a model that has only parameters without a tensor in common with this one, as a frozen part.
  const auto has_own = [&](const Layout::value_type& item) {
    const auto own = before.find(place(item));
    return own != before.end() && of(own->second).defined();
  };
  if (restored_ && std::ranges::none_of(layout, has_own)) {
    for (const auto& item : layout) before.try_emplace(place(item), item.first);
  }
  Tensors kept;
  for (const auto& item : layout) {
    const auto& [name, expected] = item;
    const auto found = before.find(place(item));
    const at::Tensor tensor = found == before.end() ? at::Tensor() : of(found->second);
    if (!tensor.defined() || tensor.sizes() != expected.sizes) continue;
    kept[name] = tensor.to(expected.device, expected.dtype);
  }
  tensors_ = std::move(kept);
  layout_ = std::move(layout);
  attached_ = true;
}

void HookState::check_layout(const Tensors& state, const Layout& layout) const {
  for (const auto& [name, tensor] : state) {
    const auto found = layout.find(name);
    if (found == layout.end()) refuse_state(hook_, fmt::format("this hook keeps no '{}'", name));
    const auto& [sizes, dtype, device, parameter] = found->second;
    if (tensor.sizes() != sizes || tensor.scalar_type() != dtype) {
      refuse_state(hook_,
                   fmt::format("'{}' has shape [{}] and dtype {}, not [{}] and {}", name,
                               fmt::join(tensor.sizes(), ", "), comm::name_of(tensor.scalar_type()),
                               fmt::join(sizes, ", "), comm::name_of(dtype)));
    }
  }
}

void HookState::check(const Tensors& state,
                      std::initializer_list<std::string_view> prefixes) const {
  for (const auto& [name, tensor] : state) {
    if (std::ranges::none_of(prefixes, [&](auto prefix) { return name.starts_with(prefix); })) {
      refuse_state(hook_, fmt::format("'{}' is not part of this hook's state ({})", name,
                                      fmt::join(prefixes.begin(), prefixes.end(), ", ")));
    }
    if (!tensor.defined()) refuse_state(hook_, fmt::format("'{}' is an undefined tensor", name));
    if (!is_finite(tensor)) refuse_state(hook_, fmt::format("'{}' has a NaN or an infinity", name));
  }
  if (attached_) check_layout(state, layout_);
}

void HookState::restore(const Tensors& state, std::initializer_list<std::string_view> prefixes) {
  check(state, prefixes);
  Tensors copies;
  for (const auto& [name, tensor] : state) {
    copies[name] = tensor.detach().clone();
    if (attached_) copies[name] = copies[name].to(layout_.at(name).device);
  }
  tensors_ = std::move(copies);
  restored_ = true;
  staged_.clear();
  replaced_.clear();
}

at::Tensor part_of(const at::Tensor& flat, const Bucket& bucket, size_t i) {
  const at::Tensor real = as_reals(bucket.gradients[i]);
  // In the order of memory, which is the one thing a gradient of any strides and `flat` share.
  return flat.narrow(0, real.storage_offset() - bucket.flat.storage_offset(), real.numel());
}

void add_residuals(const Bucket& bucket, const HookState& residuals) {
  for (size_t i = 0; i < bucket.names.size(); ++i) {
    const at::Tensor residual = residuals.of(bucket.names[i]);
    if (residual.defined()) bucket.gradients[i].add_(residual);
  }
}

void stage_residuals(const Bucket& bucket, const at::Tensor& sent, HookState& residuals) {
  for (size_t i = 0; i < bucket.names.size(); ++i) {
    at::Tensor next = bucket.gradients[i].clone();
    at::Tensor real = as_reals(next);
    // clone() keeps the strides of tensors without gaps, such as gradients in buckets.
    real.as_strided({real.numel()}, {1}, real.storage_offset()).sub_(part_of(sent, bucket, i));
    residuals.stage(bucket.names[i], std::move(next));
  }
}

void end_pass_of_residuals(const std::vector<std::string>& unused, HookState& residuals) {
  for (const auto& name : unused) {
    const at::Tensor now = residuals.of(name);
    if (now.defined()) residuals.revert(name, at::zeros_like(now));
  }
  residuals.end_pass();
}

HookState::Expected expected_for(const at::Tensor& parameter, std::vector<int64_t> sizes) {
  return {.sizes = std::move(sizes),
          .dtype = parameter.scalar_type(),
          .device = parameter.device(),
          .parameter = c10::weak_intrusive_ptr<c10::TensorImpl>(parameter.getIntrusivePtr())};
}

HookState::Layout residual_layout(const Tensors& parameters) {
  HookState::Layout layout;
  for (const auto& [name, parameter] : parameters) {
    layout.try_emplace(name, expected_for(parameter, parameter.sizes().vec()));
  }
  return layout;
}

int64_t number_in(std::string_view hook, const Tensors& state, const std::string& name) {
  const auto found = state.find(name);
  const bool good = found != state.end() && found->second.defined() && found->second.numel() == 1 &&
                    at::isIntegralType(found->second.scalar_type(), /*includeBool=*/false) &&
                    found->second.item<int64_t>() >= 0;
  if (!good) refuse_state(hook, fmt::format("there is no count '{}'", name));
  return found->second.item<int64_t>();
}

void CommHook::end_pass(const std::vector<std::string>&) {}

void CommHook::attach(const Tensors&) {}

void CommHook::restore(const Tensors& state) {
  if (!state.empty()) {
    refuse_state(name(), fmt::format("this hook keeps no '{}'", state.begin()->first));
  }
}

void CommHook::check(const Tensors&) const {}

void CommHook::rescale(double) {
  if (state().empty()) return;
  throw ConfigError(fmt::format(
      "[{}] the loss scale has changed, and what this hook keeps from pass to pass may be in the "
      "old one: override CommHook::rescale()",
      name()));
}

}  // namespace lockstep::parallel
