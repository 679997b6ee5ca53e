// What of a module takes part in training.
#pragma once

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::parallel {

struct Named {
  std::string name;
  at::Tensor tensor;
};

// Each tensor once, under its first name, in registration order.
struct Model {
  std::vector<Named> parameters;
  std::vector<Named> buffers;

  static Model of(const torch::nn::Module& module);
  std::vector<Named> trainable() const;
  // Parameters, then buffers.
  std::vector<at::Tensor> tensors() const;
};

// Throws ConfigError on all ranks unless the model is fit for training on `device` and described
// alike by every rank.
void verify(const Model& model, const Group& group, at::Device device);

// A kind, a name, and what has to agree, as "parameter 'fc.weight': float32 [256, 784], trainable".
// Private to verify(), and its tests.
std::vector<std::string> describe(const Model& model);

// The first difference between the ranks' descriptions, as an error's text; empty when there is
// none.
std::string first_difference(const std::vector<std::vector<std::string>>& ranks);

}  // namespace lockstep::parallel
