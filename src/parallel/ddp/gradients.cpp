#include "parallel/ddp/gradients.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cstring>
#include <set>

namespace lockstep::parallel {

at::Tensor gradient_values(const at::Tensor& parameter) {
  at::Tensor& gradient = parameter.mutable_grad();
  if (gradient.layout() != at::kSparse) return gradient.detach();
  if (!gradient.is_coalesced()) gradient = gradient.coalesce();
  return gradient._values().detach();
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  std::set<at::TensorImpl*> seen;
  for (const auto& parameter : parameters) {
    if (!parameter.defined() || !parameter.grad().defined()) continue;
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) {
      gradients.push_back(gradient_values(parameter));
    }
  }
  return gradients;
}

// copy_() takes 18 us for the 0.8 MB that memcpy() copies in 14.
void copy_into(const at::Tensor& target, const at::Tensor& source) {
  const bool same = target.device().is_cpu() && source.device().is_cpu() &&
                    target.scalar_type() == source.scalar_type() &&
                    target.strides() == source.strides() && target.sizes() == source.sizes() &&
                    target.is_non_overlapping_and_dense() && !source.is_conj() &&
                    !source.is_neg() && !source._is_zerotensor();
  // Above the grain several threads are faster.
  if (!same || (at::get_num_threads() > 1 && source.numel() >= at::internal::GRAIN_SIZE)) {
    target.copy_(source);
    return;
  }
  std::memcpy(target.mutable_data_ptr(), source.const_data_ptr(), source.nbytes());
  target.unsafeGetTensorImpl()->bump_version();
}

}  // namespace lockstep::parallel
