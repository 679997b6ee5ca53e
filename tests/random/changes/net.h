// The models of these trainings, their optimizers and their data.
#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "random/changes/course.h"

namespace lockstep::test::changes {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

// A linear layer that draws nothing when it is made, and whose weight may become another's.
struct LayerImpl : torch::nn::Module {
  LayerImpl(int64_t in, int64_t out, uint64_t seed);
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight, bias); }
  void tie_weight(const at::Tensor& other);
  at::Tensor weight, bias;
};
TORCH_MODULE(Layer);

// What a block's layer `up` begins with.
Layer up_layer(uint64_t seed);

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(uint64_t seed);
  at::Tensor forward(const at::Tensor& x) { return x + down(at::tanh(up(x))); }
  Layer up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl(const Course& course, uint64_t seed);
  at::Tensor forward(at::Tensor x);
  // What a change does to the model.
  void take(const Course& course, const Change& change);
  void set_trainable(int block, bool trainable);
  std::vector<Block> blocks;
  std::set<int> skipped;
  at::Tensor seen;  // a buffer that each forward changes by what it sees
  torch::nn::BatchNorm1d norm{nullptr};
  // What dropout draws: numbers of these sizes, from 0 to 1. None: no dropout.
  std::function<at::Tensor(at::IntArrayRef)> noise;
};
TORCH_MODULE(Net);

// What a forward of x makes of the buffer.
at::Tensor seen_after(const at::Tensor& seen, const at::Tensor& x);

// The net, or its halves as models of their own, under the same names.
std::vector<std::shared_ptr<torch::nn::Module>> models_of(const Net& net, int count);

// Each once, by its first name.
using Named = std::vector<std::pair<std::string, at::Tensor>>;
Named parameters_of(const NetImpl& net);

// Which blocks' parameters each of the optimizers' groups has; what a change does to it.
using Groups = std::vector<std::vector<int>>;
Groups groups_of(const Course& course);
void change_groups(const Course& course, const Change& change, Groups& groups);
// Of each group the parameters, each in the first group that has it.
std::vector<Named> members_of(const NetImpl& net, const Groups& groups);

// Small enough that rounding does not grow from step to step.
double rate_of(const std::string& optimizer);
std::unique_ptr<Optimizer> made(const std::string& name, std::vector<OptimizerParamGroup> groups);

// One step of an optimizer's groups to what they are to have now, as a program does it by hand:
// parameters are put in, groups are added at the end and taken from there, and state that no
// parameter has any more is erased.
void give_members(Optimizer& optimizer, const std::vector<Named>& now);
// A group's parameters alone.
OptimizerParamGroup group_of(const Named& members);

// The data set: inputs and targets.
std::pair<at::Tensor, at::Tensor> samples_of(uint64_t seed);
// A rank's batch of a step within a Join.
std::pair<at::Tensor, at::Tensor> batch_of(uint64_t seed, int step, int rank);

// The first that differs, and by how much; empty: none.
std::string difference(const Named& got, const Named& want, double tolerance);
std::string bytes_of(const Named& state);

}  // namespace lockstep::test::changes
