// Activation checkpointing: a backward that runs another backward inside.
#pragma once

#include <torch/torch.h>

namespace lockstep::test {

// Runs the layer without keeping its activations, and once more in backward.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            int64_t layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = layer;
    return reinterpret_cast<torch::nn::LinearImpl*>(layer)->forward(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    auto* layer = reinterpret_cast<torch::nn::LinearImpl*>(context->saved_data["layer"].toInt());
    const auto x = context->get_saved_variables()[0].detach().requires_grad_(true);
    {
      const at::AutoGradMode enable_grad(true);
      layer->forward(x).backward(gradients[0]);
    }
    return {x.grad(), {}};
  }
};

inline at::Tensor checkpointed(torch::nn::Linear& layer, const at::Tensor& x) {
  return Checkpoint::apply(x, reinterpret_cast<int64_t>(layer.get()));
}

}  // namespace lockstep::test
