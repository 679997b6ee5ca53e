// A small model, its data, and trainings of both by hand and by a Trainer.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/lockstep.h"
#include "lockstep/train/trainer.h"

namespace lockstep::test {

struct TrainNetImpl : torch::nn::Module {
  TrainNetImpl() {
    first = register_module("first", torch::nn::Linear(6, 16));
    norm = register_module("norm", torch::nn::BatchNorm1d(16));
    dropout = register_module("dropout", torch::nn::Dropout(0.2));
    last = register_module("last", torch::nn::Linear(16, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = torch::tanh(call(norm, call(first, x)));
    return call(last, call(dropout, hidden));
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Dropout dropout{nullptr};
};
TORCH_MODULE(TrainNet);

inline data::TensorDataset train_samples(int64_t count, uint64_t seed = 5) {
  const at::Tensor x = at::randn({count, 6}, at::make_generator<at::CPUGeneratorImpl>(seed));
  return {x, (x.sum(1) > 0).to(at::kLong) + (x.select(1, 0) > 1).to(at::kLong)};
}

// All parameters and buffers as one vector of float64.
inline at::Tensor flat(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  const auto add = [&](const at::Tensor& tensor) {
    const auto reals = tensor.is_complex() ? at::view_as_real(tensor.detach()) : tensor.detach();
    all.push_back(reals.to(at::kDouble).flatten());
  };
  for (const auto& tensor : module.parameters()) add(tensor);
  for (const auto& tensor : module.buffers()) add(tensor);
  return torch::cat(all);
}

// What a training has, by name.
struct Features {
  std::set<std::string, std::less<>> names;
  bool has(std::string_view name) const { return names.contains(name); }
  std::string text() const {
    std::string all;
    for (const auto& name : names) all += (all.empty() ? "" : "_") + name;
    return all.empty() ? "plain" : all;
  }
};

inline void PrintTo(const Features& features, std::ostream* out) { *out << features.text(); }

// Whether an Fsdp divides the model, and how its ranks come to whole parameters.
enum class Division { None, Shared, Gathered };

inline std::optional<FsdpOptions> divided(Division division) {
  if (division == Division::None) return std::nullopt;
  return FsdpOptions{.min_num_params = 30, .share_memory = division == Division::Shared};
}

// Does something at the end of a step.
struct AtStep : train::Callback {
  AtStep(int64_t number, std::function<void()> what) : step(number), act(std::move(what)) {}
  void on_step_end(const train::RunState& state, train::Requests&) override {
    if (state.step == step) act();
  }
  int64_t step;
  std::function<void()> act;
};

inline train::TrainerOptions train_options(const Features& features) {
  train::TrainerOptions options{.optimizer = train::adamw({.lr = 1e-2, .weight_decay = 0.1}),
                                .epochs = 2,
                                .loader = {.batch_size = 5, .seed = 3}};
  if (features.has("sgd")) options.optimizer = train::sgd({.lr = 0.05, .momentum = 0.9});
  if (features.has("accumulation")) options.accumulation = 3;
  if (features.has("clip")) options.max_grad_norm = 0.5;
  if (features.has("fp16")) {
    options.precision = train::Precision::Float16;
    options.scaler = {.init_scale = 1048576, .growth_interval = 4};
  }
  if (features.has("bf16")) options.precision = train::Precision::BFloat16;
  if (features.has("zero")) options.zero = true;
  if (features.has("sync_bn")) options.sync_batch_norm = 0;
  if (features.has("sync_pairs")) options.sync_batch_norm = 2;
  if (features.has("hook")) {
    options.ddp.hook = std::make_shared<PowerSgd>(
        PowerSgdOptions{.start_iteration = 4, .least_compression = 1.01});
  }
  if (features.has("lanes")) options.loader.lanes = 4;
  if (features.has("scaling")) options.lr_scaling = LrScaling::Sqrt;
  if (features.has("cosine")) options.learning_rate = train::cosine_decay({.steps = 5}, 1e-4);
  if (features.has("average")) options.weight_average = WeightAverageOptions{.decay = 0.8};
  if (features.has("drop_last")) options.loader.drop_last = true;
  return options;
}

}  // namespace lockstep::test
