// Results into a caller's tensor, in any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <optional>

namespace lockstep::comm {

// While the tensor is written. One that was made in an InferenceMode libtorch writes only in a
// thread that is in one.
class Writing {
 public:
  [[nodiscard]] explicit Writing(const at::Tensor& target) {
    if (target.is_inference()) inference_.emplace();
  }

 private:
  const at::NoGradGuard no_grad_;
  std::optional<c10::InferenceMode> inference_;
};

inline void assign(const at::Tensor& target, const at::Tensor& values) {
  const Writing writing(target);
  target.copy_(values);
}

}  // namespace lockstep::comm
