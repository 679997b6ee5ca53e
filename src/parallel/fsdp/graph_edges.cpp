#include "parallel/fsdp/graph_edges.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "parallel/nn/parameter_paths.h"

namespace lockstep::parallel {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::FunctionPostHook;
using torch::autograd::FunctionPreHook;
using torch::autograd::Node;
using torch::autograd::variable_list;

bool is_inner(Node& node, uint64_t since) {
  return node.sequence_nr() >= since && dynamic_cast<AccumulateGrad*>(&node) == nullptr;
}

// One a node, for all calls that lead to it.
class EdgeHook {
 public:
  void add(std::weak_ptr<EdgeListener> listener, size_t edge) {
    std::erase_if(listeners_, [](const auto& item) { return item.first.expired(); });
    listeners_.emplace_back(std::move(listener), edge);
  }

 protected:
  void reach() const {
    for (const auto& [listener, edge] : listeners_) {
      if (const auto alive = listener.lock()) alive->reach(edge);
    }
  }

 private:
  std::vector<std::pair<std::weak_ptr<EdgeListener>, size_t>> listeners_;
};

class EdgePreHook : public EdgeHook, public FunctionPreHook {
 public:
  variable_list operator()(const variable_list& gradients) override {
    reach();
    return gradients;
  }
};

class EdgePostHook : public EdgeHook, public FunctionPostHook {
 public:
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    reach();
    return outputs;
  }
};

EdgeHook* find(const auto& hooks) {
  for (const auto& hook : hooks) {
    if (auto* ours = dynamic_cast<EdgeHook*>(hook.get())) return ours;
  }
  return nullptr;
}

}  // namespace

std::vector<Node*> edges_of(const std::vector<at::Tensor>& outputs, uint64_t since,
                            at::Device device) {
  std::vector<Node*> inner, edges;
  std::unordered_set<const Node*> met;
  for (const auto& output : outputs) {
    if (!output.defined() || !is_made_since(output, since)) continue;
    Node* node = output.grad_fn().get();
    if (met.insert(node).second) inner.push_back(node);
  }
  for (size_t i = 0; i < inner.size(); ++i) {
    bool leads_on = false;
    for (const auto& edge : inner[i]->next_edges()) {
      if (!edge.is_valid()) continue;
      Node* next = edge.function.get();
      if (is_parameter_path(*next)) continue;  // no gradient comes that way
      leads_on = true;
      if (!met.insert(next).second) continue;
      if (is_inner(*next, since)) {
        inner.push_back(next);
      } else if (next->input_metadata(edge.input_nr).device() == device) {
        edges.push_back(next);
      } else {
        return {};
      }
    }
    if (!leads_on) return {};
  }
  return edges;
}

bool is_made_since(const at::Tensor& tensor, uint64_t since) {
  const auto& node = tensor.grad_fn();
  return node && is_inner(*node, since);
}

void watch_edge(Node& node, std::weak_ptr<EdgeListener> listener, size_t edge) {
  const bool is_leaf = dynamic_cast<AccumulateGrad*>(&node) != nullptr;
  EdgeHook* known = is_leaf ? find(node.post_hooks()) : find(node.tensor_pre_hooks());
  if (known == nullptr && is_leaf) {
    auto hook = std::make_unique<EdgePostHook>();
    known = hook.get();
    node.add_post_hook(std::move(hook));
  } else if (known == nullptr) {
    auto hook = std::make_unique<EdgePreHook>();
    known = hook.get();
    node.tensor_pre_hooks().insert(node.tensor_pre_hooks().begin(), std::move(hook));
  }
  known->add(std::move(listener), edge);
}

}  // namespace lockstep::parallel
