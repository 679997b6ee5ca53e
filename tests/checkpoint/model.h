// A small model of everything that a checkpoint meets, and how it is trained.
#pragma once

#include <torch/torch.h>

#include <vector>

#include "lockstep/comm/world.h"

namespace lockstep::test {

// Tied, complex, narrow, integer, boolean, empty and strided tensors, and one that is cut among
// ranks.
struct Everything : torch::nn::Module {
  explicit Everything(int64_t width = 5) {
    torch::manual_seed(1);
    first = register_module("first", torch::nn::Linear(3, width));
    second = register_module("second", torch::nn::Linear(width, 3));
    tied = register_parameter("tied", first->weight);
    large = register_parameter("large", torch::randn({300, 1, 301}));
    complex = register_buffer("complex", torch::randn({2, 3}, torch::kComplexFloat));
    turned = register_parameter("turned", torch::randn({4, 6}).t());
    half = register_buffer("half", torch::randn({7}).to(torch::kBFloat16));
    register_buffer("flags", torch::tensor({true, false, true}));
    register_buffer("count", torch::tensor(int64_t{7}));
    register_buffer("none", torch::empty({0, 4}));
  }
  at::Tensor loss() {
    return second(torch::tanh(first(torch::ones({2, 3})))).square().mean() + large.square().mean() +
           turned.sin().mean();
  }
  // Each once.
  std::vector<at::Tensor> trained() const {
    return {first->weight, first->bias, second->weight, second->bias, large, turned};
  }
  void scramble() {
    const at::NoGradGuard no_grad;
    for (auto& tensor : parameters()) tensor.zero_();
    for (auto& tensor : buffers()) tensor.zero_();
  }

  torch::nn::Linear first{nullptr}, second{nullptr};
  at::Tensor tied, large, complex, turned, half;
};

inline void train(Everything& net, torch::optim::Optimizer& optimizer, int steps) {
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    net.loss().backward();
    optimizer.step();
  }
}

// All parameters and buffers have the same bits.
inline bool same(const torch::nn::Module& a, const torch::nn::Module& b) {
  const auto alike = [](const auto& one, const auto& other) {
    if (one.size() != other.size()) return false;
    for (size_t i = 0; i < one.size(); ++i) {
      if (!at::equal(one[i], other[i])) return false;
    }
    return true;
  };
  return alike(a.parameters(), b.parameters()) && alike(a.buffers(), b.buffers());
}

}  // namespace lockstep::test
