// Where the graph of one call ends.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace lockstep::parallel {

// The nodes that the call's own nodes lead to: those that were there before it, and leaves. Once
// backward() has come to all of them, the call's nodes have all been run. `since` is what
// at::sequence_number::peek() was when the call began. Empty where that cannot be said, because
// a node leads to none of them, or one lies on another device, whose thread would tell.
std::vector<torch::autograd::Node*> edges_of(const std::vector<at::Tensor>& outputs, uint64_t since,
                                             at::Device device);

// Whether the tensor comes from a node that is as new as `since`.
bool is_made_since(const at::Tensor& tensor, uint64_t since);

class EdgeListener {
 public:
  virtual ~EdgeListener() = default;
  // Backward has come to the node, and has its whole gradient; a leaf's has been accumulated.
  virtual void reach(size_t edge) = 0;
};

// Calls listener->reach(edge) whenever backward comes to the node, before anything else that
// watches the node until now, or, of a leaf, after it. A leaf's node may last longer than the
// listener.
void watch_edge(torch::autograd::Node& node, std::weak_ptr<EdgeListener> listener, size_t edge);

}  // namespace lockstep::parallel
