#include "parallel/hook_state.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/types.h>

#include <algorithm>

#include "lockstep/core/error.h"

namespace lockstep::parallel {

void add_residuals(const Bucket& bucket, Tensors& residuals) {
  for (size_t i = 0; i < bucket.names.size(); ++i) {
    const at::Tensor& gradient = bucket.gradients[i];
    at::Tensor& residual = residuals[bucket.names[i]];
    if (!residual.defined()) residual = at::zeros_like(gradient);
    gradient.add_(residual);
    residual.copy_(gradient);
  }
}

void keep_residuals(const Bucket& bucket, const at::Tensor& sent, Tensors& residuals) {
  for (size_t i = 0; i < bucket.names.size(); ++i) {
    const at::Tensor& gradient = bucket.gradients[i];
    const int64_t offset = gradient.is_complex() ? at::view_as_real(gradient).storage_offset()
                                                 : gradient.storage_offset();
    const int64_t numel = gradient.numel() * (gradient.is_complex() ? 2 : 1);
    // In the order of memory, which is the one thing a gradient of any strides and `sent` share.
    const at::Tensor part = sent.narrow(0, offset - bucket.flat.storage_offset(), numel);
    at::Tensor& residual = residuals[bucket.names[i]];
    at::Tensor real = residual.is_complex() ? at::view_as_real(residual) : residual;
    real.as_strided({numel}, {1}, real.storage_offset()).sub_(part);
  }
}

Tensors checked_state(std::string_view hook, const Tensors& state,
                      std::initializer_list<std::string_view> prefixes) {
  Tensors copies;
  for (const auto& [name, tensor] : state) {
    if (std::ranges::none_of(prefixes, [&](auto prefix) { return name.starts_with(prefix); })) {
      throw ConfigError(fmt::format("[{}] restore: '{}' is not part of this hook's state ({})",
                                    hook, name, fmt::join(prefixes.begin(), prefixes.end(), ", ")));
    }
    copies[name] = tensor.clone();
  }
  return copies;
}

int64_t number_in(std::string_view hook, const Tensors& state, const std::string& name) {
  const auto found = state.find(name);
  if (found == state.end() || found->second.numel() != 1) {
    throw ConfigError(fmt::format(
        "[{}] restore: there is no number '{}': is this the state of a {}?", hook, name, hook));
  }
  return found->second.item<int64_t>();
}

void CommHook::restore(const Tensors& state) { checked_state(name(), state, {}); }

}  // namespace lockstep::parallel
