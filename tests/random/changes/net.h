// The models of these trainings, their optimizers and their data.
#pragma once

#include <torch/nn/modules/linear.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/data/tensor_dataset.h"
#include "random/changes/course.h"

namespace lockstep::test::changes {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

// What a block's layer `up` begins with.
torch::nn::Linear up_layer(uint64_t seed);

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(uint64_t seed);
  at::Tensor forward(const at::Tensor& x);
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(uint64_t seed);
  at::Tensor forward(at::Tensor x);
  std::vector<Block> blocks;
  std::set<int> skipped;
  at::Tensor seen;  // a buffer that each forward changes
};
TORCH_MODULE(Net);

// Small enough that rounding does not grow from step to step.
double rate_of(const std::string& optimizer);
std::unique_ptr<Optimizer> made(const std::string& name, std::vector<OptimizerParamGroup> groups);

data::TensorDataset samples_of(uint64_t seed);

// Tensors, each with its name.
using Named = std::vector<std::pair<std::string, at::Tensor>>;
// The first that differs, and by how much; empty: none.
std::string difference(const Named& got, const Named& want, double tolerance);
std::string bytes_of(const Named& state);

}  // namespace lockstep::test::changes
