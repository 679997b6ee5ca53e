// Results into a caller's tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <optional>

namespace lockstep::comm {

// Also where the tensor was made in an InferenceMode that has ended, outside of which libtorch
// writes to none.
inline void assign(const at::Tensor& target, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  std::optional<c10::InferenceMode> inference;
  if (target.is_inference()) inference.emplace();
  target.copy_(values);
}

}  // namespace lockstep::comm
