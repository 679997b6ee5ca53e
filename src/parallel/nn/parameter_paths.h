// Edges of the graph that say whose gradients a node computes by itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <unordered_set>
#include <vector>

namespace lockstep::parallel {

// Leads from the node that has tensors() as arguments to the parameters' own nodes, so that
// autograd, which leaves out what leads to none of the tensors that it was asked for, runs the node
// for these parameters, too. Nothing goes that way: a parameter that no other node leads to is not
// reached, and its hooks do not run.
class ParameterPaths {
 public:
  // Of those that want a gradient. To one that is computed from other tensors no path leads.
  explicit ParameterPaths(const std::vector<at::Tensor>& parameters);

  const std::vector<at::Tensor>& tensors() const { return tensors_; }

  // Within the node's backward: what else of the running graph leads to the parameters has to be
  // known before it ends.
  class Elsewhere {
   public:
    void find();
    bool contains(const torch::autograd::Node* node) const { return nodes_->contains(node); }

   private:
    using Nodes = std::unordered_set<const torch::autograd::Node*>;
    std::shared_ptr<const Nodes> nodes_ = std::make_shared<Nodes>();
  };
  const std::shared_ptr<Elsewhere>& elsewhere() const { return elsewhere_; }

 private:
  std::shared_ptr<Elsewhere> elsewhere_ = std::make_shared<Elsewhere>();
  std::vector<at::Tensor> tensors_;
};

// Whether the node is part of such a path.
bool is_parameter_path(const torch::autograd::Node& node);

}  // namespace lockstep::parallel
