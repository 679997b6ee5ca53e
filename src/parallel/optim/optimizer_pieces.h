// An optimizer's state, piece by piece.
#pragma once

#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

namespace lockstep::parallel {

struct OptimizerPiece {
  std::string name;  // "exp_avg"
  at::Tensor tensor;
};

// A parameter's state: tensors, and numbers as tensors of one element. Of a class that is not
// libtorch's own, one tensor of bytes as it saves itself.
std::vector<OptimizerPiece> pieces_of(const torch::optim::OptimizerParamState& state);

// A group's learning rate and other options, as they save themselves.
std::string bytes_of(const torch::optim::OptimizerOptions& options);

}  // namespace lockstep::parallel
