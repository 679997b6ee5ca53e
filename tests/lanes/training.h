// Programs with lanes, and what is left of a run: one number for parameters, buffers, the
// optimizer's state and losses.
#pragma once

#include <sys/mman.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/tensor_dataset.h"
#include "lockstep/parallel/autocast.h"
#include "lockstep/parallel/clip.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "parallel/ddp/consistency/fingerprint.h"
#include "support/spawn.h"

namespace lockstep::test {

struct LaneModel : torch::nn::Module {
  virtual at::Tensor loss(const at::Tensor& x, const at::Tensor& y) = 0;
  // Samples alike for the same number.
  virtual data::TensorDataset samples(int64_t count) const = 0;
  virtual double clip() const { return 0; }
};

inline at::Tensor drawn(at::IntArrayRef sizes, uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed));
}
inline at::Tensor numbers_below(int64_t limit, at::IntArrayRef sizes, uint64_t seed) {
  return at::randint(limit, sizes, at::detail::createCPUGenerator(seed), at::kLong);
}

struct Convolutions : LaneModel {
  Convolutions() {
    first =
        register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 6, 3).padding(1)));
    norm = register_module("norm", torch::nn::BatchNorm2d(6));
    second = register_module("second", torch::nn::Conv2d(torch::nn::Conv2dOptions(6, 5, 3)));
    norm2 = register_module("norm2", torch::nn::BatchNorm2d(5));
    dropout = register_module("dropout", torch::nn::Dropout(0.3));
    last = register_module("last", torch::nn::Linear(5 * 6 * 6, 4));
  }
  at::Tensor loss(const at::Tensor& x, const at::Tensor& y) override {
    auto z = torch::relu(norm(first(x)));
    z = dropout(torch::relu(norm2(second(z))));
    return torch::nn::functional::cross_entropy(last(z.flatten(1)), y);
  }
  data::TensorDataset samples(int64_t count) const override {
    return {drawn({count, 2, 8, 8}, 1), numbers_below(4, {count}, 2)};
  }
  torch::nn::Conv2d first{nullptr}, second{nullptr};
  torch::nn::BatchNorm2d norm{nullptr}, norm2{nullptr};
  torch::nn::Dropout dropout{nullptr};
  torch::nn::Linear last{nullptr};
};

struct LanguageModel : LaneModel {
  LanguageModel() {
    table = register_module("table", torch::nn::Embedding(19, 8));
    lstm = register_module(
        "lstm", torch::nn::LSTM(
                    torch::nn::LSTMOptions(8, 10).num_layers(2).dropout(0.2).batch_first(true)));
    last = register_module("last", torch::nn::Linear(10, 19));
  }
  at::Tensor loss(const at::Tensor& x, const at::Tensor& y) override {
    const auto out = std::get<0>(lstm->forward(table(x)));
    return torch::nn::functional::cross_entropy(last(out).flatten(0, 1), y.flatten());
  }
  data::TensorDataset samples(int64_t count) const override {
    const auto text = numbers_below(19, {count, 7}, 3);
    return {text.slice(1, 0, 6).contiguous(), text.slice(1, 1, 7).contiguous()};
  }
  torch::nn::Embedding table{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::Linear last{nullptr};
};

struct Transformer : LaneModel {
  Transformer() {
    table = register_module("table", torch::nn::Embedding(23, 16));
    layers = register_module(
        "layers",
        torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(
            torch::nn::TransformerEncoderLayerOptions(16, 2).dim_feedforward(32).dropout(0.1), 2)));
    last = register_module("last", torch::nn::Linear(16, 23));
  }
  at::Tensor loss(const at::Tensor& x, const at::Tensor& y) override {
    at::Tensor logits;
    {
      const parallel::Autocast autocast(at::kCPU, at::kBFloat16);
      logits = last(layers(table(x).transpose(0, 1)).transpose(0, 1));
    }
    return torch::nn::functional::cross_entropy(logits.to(at::kFloat).flatten(0, 1), y.flatten());
  }
  data::TensorDataset samples(int64_t count) const override {
    const auto text = numbers_below(23, {count, 9}, 4);
    return {text.slice(1, 0, 8).contiguous(), text.slice(1, 1, 9).contiguous()};
  }
  double clip() const override { return 0.5; }
  torch::nn::Embedding table{nullptr};
  torch::nn::TransformerEncoder layers{nullptr};
  torch::nn::Linear last{nullptr};
};

struct LaneRun {
  std::string model = "conv";
  std::string optimizer = "sgd";
  int64_t lanes = 8;
  int64_t steps = 3;
  DdpOptions ddp = {};
  int64_t prefetch = 0;
};

inline std::shared_ptr<LaneModel> lane_model(const std::string& name) {
  torch::manual_seed(11);
  if (name == "conv") return std::make_shared<Convolutions>();
  if (name == "lstm") return std::make_shared<LanguageModel>();
  return std::make_shared<Transformer>();
}

inline std::unique_ptr<torch::optim::Optimizer> lane_optimizer(const std::string& name,
                                                               std::vector<at::Tensor> parameters,
                                                               const Group& group) {
  if (name == "sgd") {
    return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                               torch::optim::SGDOptions(0.05).momentum(0.9));
  }
  if (name == "adamw") {
    return std::make_unique<torch::optim::AdamW>(std::move(parameters),
                                                 torch::optim::AdamWOptions(0.01));
  }
  return std::make_unique<ZeroOptimizer>(
      std::move(parameters), group,
      parallel::zero<parallel::FusedAdamW>(torch::optim::AdamWOptions(0.01)));
}

inline uint64_t chained(uint64_t sum, uint64_t next) {
  return (sum ^ next) * 0x9e3779b97f4a7c15 + (sum >> 29);
}

inline uint64_t lane_hash(const torch::nn::Module& model) {
  uint64_t sum = 1;
  for (const auto& parameter : model.parameters()) {
    sum = chained(sum, parallel::fingerprint(parameter));
    if (parameter.grad().defined()) sum = chained(sum, parallel::fingerprint(parameter.grad()));
  }
  for (const auto& buffer : model.buffers()) sum = chained(sum, parallel::fingerprint(buffer));
  return sum;
}

inline uint64_t train_in_lanes(World& world, const LaneRun& run) {
  auto model = lane_model(run.model);
  DdpOptions options = run.ddp;
  options.lanes = run.lanes;
  Ddp ddp(model, world.group(), options);
  const auto optimizer = lane_optimizer(run.optimizer, model->parameters(), world.group());
  const int64_t batch = 3;
  Loader loader(model->samples(batch * run.lanes * 2), world,
                {.batch_size = batch, .seed = 4, .prefetch = run.prefetch, .lanes = run.lanes});
  parallel::LaneMean loss(ddp);
  uint64_t losses = 0;
  int64_t taken = 0;
  for (int64_t epoch = 0; taken < run.steps; ++epoch) {
    for (auto step : loader.steps(epoch)) {
      ddp.zero_grad();
      for (auto [x, y] : ddp.lanes(step)) {
        const auto value = model->loss(x, y);
        value.backward();
        loss.add(value);
      }
      const double mean = loss.mean();
      losses = chained(losses, parallel::fingerprint(at::tensor({mean}, at::kDouble)));
      if (model->clip() > 0) parallel::clip_grad_norm_(model->parameters(), model->clip());
      optimizer->step();
      if (++taken == run.steps) break;
    }
  }
  uint64_t sum = chained(lane_hash(*model), losses);
  for (const auto& parameter : model->parameters()) {
    const auto found = optimizer->state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer->state().end()) continue;  // divided, or none
    if (run.optimizer == "sgd") {
      auto& state = static_cast<torch::optim::SGDParamState&>(*found->second);
      sum = chained(sum, parallel::fingerprint(state.momentum_buffer()));
    } else {
      auto& state = static_cast<torch::optim::AdamWParamState&>(*found->second);
      sum = chained(sum, parallel::fingerprint(state.exp_avg()));
      sum = chained(sum, parallel::fingerprint(state.exp_avg_sq()));
    }
  }
  return sum;
}

// What each rank of a world found, in the parent.
class Found {
 public:
  Found()
      : values_(
            static_cast<uint64_t*>(mmap(nullptr, kMost * sizeof(uint64_t), PROT_READ | PROT_WRITE,
                                        MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~Found() { munmap(values_, kMost * sizeof(uint64_t)); }
  Found(const Found&) = delete;
  Found& operator=(const Found&) = delete;
  uint64_t& of(int rank) const { return values_[rank]; }

 private:
  static constexpr size_t kMost = 64;
  uint64_t* values_;
};

// Of `body` on so many ranks; 0 when they differ.
inline uint64_t result_of(const Ranks& ranks, const std::function<uint64_t(World&)>& body) {
  const Found found;
  spawn(ranks, [&](World& world) { found.of(world.rank()) = body(world); });
  for (int rank = 1; rank < ranks.count; ++rank) {
    if (found.of(rank) != found.of(0)) return 0;
  }
  return found.of(0);
}

}  // namespace lockstep::test
