#include "parallel/nn/parameter_paths.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

namespace lockstep::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Node;
using torch::autograd::variable_list;

struct ParameterPath : torch::autograd::Function<ParameterPath> {
  static at::Tensor forward(AutogradContext*, const at::Tensor&) { return at::empty({0}); }
  static variable_list backward(AutogradContext*, const variable_list&) { return {at::Tensor()}; }
};

// An undefined gradient would still run what it arrives at, with its hooks. Without results the
// engine goes on to no node, and would wait for this edge where others lead there.
class EndOfPath : public torch::autograd::FunctionPostHook {
 public:
  EndOfPath(std::shared_ptr<const ParameterPaths::Elsewhere> elsewhere, const Node* parameter)
      : elsewhere_(std::move(elsewhere)), parameter_(parameter) {}

  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    return elsewhere_->contains(parameter_) ? outputs : variable_list();
  }

 private:
  std::shared_ptr<const ParameterPaths::Elsewhere> elsewhere_;
  const Node* parameter_;  // the path's node holds it
};

}  // namespace

ParameterPaths::ParameterPaths(const std::vector<at::Tensor>& parameters) {
  for (const auto& parameter : parameters) {
    if (!parameter.defined() || !parameter.requires_grad()) continue;
    // Nodes before one that is computed would wait for what it is never given.
    tensors_.push_back(ParameterPath::apply(
        parameter.is_leaf() ? parameter : at::empty({0}).set_requires_grad(true)));
    const auto& path = tensors_.back().grad_fn();
    path->add_post_hook(std::make_unique<EndOfPath>(elsewhere_, path->next_edge(0).function.get()));
  }
}

// Once for all nodes of a backward pass: a look at the whole graph for each would take time
// quadratic in their number.
void ParameterPaths::Elsewhere::find() {
  static thread_local struct {
    int graph_task = -1;
    std::weak_ptr<const Nodes> nodes;
  } last;
  const int graph_task = torch::autograd::get_current_graph_task_id();
  if (last.graph_task == graph_task) {
    if (auto nodes = last.nodes.lock()) {
      nodes_ = std::move(nodes);
      return;
    }
  }
  const auto found = std::make_shared<Nodes>();
  if (const auto* graph = torch::autograd::get_current_graph_task_nodes_in_graph()) {
    for (const Node* node : *graph) {
      if (is_parameter_path(*node)) continue;
      for (const auto& edge : node->next_edges()) {
        if (edge.is_valid() && edge.function->num_outputs() == 0) {
          found->insert(edge.function.get());
        }
      }
    }
  }
  nodes_ = found;
  last = {graph_task, found};
}

bool is_parameter_path(const Node& node) {
  return dynamic_cast<const torch::autograd::CppNode<ParameterPath>*>(&node) != nullptr;
}

}  // namespace lockstep::parallel
