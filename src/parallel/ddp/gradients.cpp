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
bool copy_bytes(void* target, at::ScalarType dtype, const at::Tensor& like,
                const at::Tensor& source) {
  // Above the grain several threads are faster.
  if (source.numel() >= at::internal::GRAIN_SIZE && at::get_num_threads() > 1) return false;
  const bool same = source.device().is_cpu() && source.scalar_type() == dtype &&
                    source.strides() == like.strides() && source.sizes() == like.sizes() &&
                    !source.is_conj() && !source.is_neg() && !source._is_zerotensor();
  if (same) std::memcpy(target, source.const_data_ptr(), source.nbytes());
  return same;
}

void copy_into(const at::Tensor& target, const at::Tensor& source) {
  if (target.device().is_cpu() && target.is_non_overlapping_and_dense() &&
      copy_bytes(target.mutable_data_ptr(), target.scalar_type(), target, source)) {
    target.unsafeGetTensorImpl()->bump_version();
  } else {
    target.copy_(source);
  }
}

}  // namespace lockstep::parallel
