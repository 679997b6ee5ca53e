// The gradients of a list of parameters, as tensors to compute on.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep::parallel {

// The values of a parameter's gradient, which is defined: the gradient itself, or what a sparse one
// stores (each index once). Writing to them changes the gradient.
at::Tensor gradient_values(const at::Tensor& parameter);

// Of all parameters that have a gradient, each once.
std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters);

// target.copy_(source), or a faster way to the same.
void copy_into(const at::Tensor& target, const at::Tensor& source);
// The faster way alone, to the CPU's memory where a tensor of `dtype` lies as `like`, which is
// dense. false, and nothing is done, where copy_() is needed.
bool copy_bytes(void* target, at::ScalarType dtype, const at::Tensor& like,
                const at::Tensor& source);

}  // namespace lockstep::parallel
