// A model whose lanes reach different parameters, one of them with sparse gradients.
#pragma once

#include <torch/torch.h>

#include <cstdint>

#include "lanes/training.h"

namespace lockstep::test {

struct LaneNet : torch::nn::Module {
  LaneNet() {
    torch::manual_seed(3);
    first = register_module("first", torch::nn::Linear(5, 7));
    second = register_module("second", torch::nn::Linear(7, 2));
    spare = register_module("spare", torch::nn::Linear(7, 2));
    never = register_module("never", torch::nn::Linear(2, 2));
    table = register_module("table",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(11, 5).sparse(true)));
  }
  at::Tensor hidden(int64_t lane, int64_t step = 0) {
    return torch::tanh(first(drawn({4, 5}, static_cast<uint64_t>(100 * step + lane)) +
                             table(numbers_below(11, {4}, static_cast<uint64_t>(lane)))));
  }
  // Some lanes go another way.
  at::Tensor loss(int64_t lane, int64_t step = 0) {
    const auto z = hidden(lane, step);
    return (lane % 3 == 0 ? spare(z) : second(z)).square().mean();
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, spare{nullptr}, never{nullptr};
  torch::nn::Embedding table{nullptr};
};

inline uint64_t gradients_hash(const torch::nn::Module& net) {
  uint64_t sum = 7;
  for (const auto& parameter : net.parameters()) {
    if (!parameter.grad().defined()) continue;
    sum = chained(sum, parallel::fingerprint(parameter.grad()));
  }
  return sum;
}

}  // namespace lockstep::test
