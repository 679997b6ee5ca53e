#include "parallel/gradients.h"

#include <ATen/ATen.h>

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

}  // namespace lockstep::parallel
