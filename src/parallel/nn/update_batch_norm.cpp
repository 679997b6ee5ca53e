#include "lockstep/parallel/update_batch_norm.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/parallel/sync_batch_norm.h"
#include "parallel/lanes/rules.h"
#include "parallel/nn/batch_norm_override.h"

namespace lockstep::parallel {
namespace {

struct NormLayer {
  at::Tensor mean, variance, count;
  std::optional<double>* momentum;
  int ranks;  // that take a batch together
};

template <class Norm>
std::optional<NormLayer> layer_as(torch::nn::Module& module) {
  auto* norm = dynamic_cast<Norm*>(&module);
  if (norm == nullptr || !norm->running_mean.defined()) return std::nullopt;
  int ranks = 1;
  if constexpr (requires { norm->group(); }) {
    ranks = norm->group().size();
  } else {
    ranks = batch_norm_ranks(module);
  }
  return NormLayer{norm->running_mean, norm->running_var, norm->num_batches_tracked,
                   &norm->options.momentum(), ranks};
}

template <size_t D>
void add_layer(torch::nn::Module& module, std::vector<NormLayer>& layers) {
  auto layer = layer_as<TorchBatchNormImpl<D>>(module);
  if (!layer) layer = layer_as<SyncBatchNormImpl<D>>(module);
  if (layer) layers.push_back(*layer);
}

// Parents first; one that is registered twice once.
std::vector<torch::nn::Module*> modules_of(torch::nn::Module& module) {
  std::vector<torch::nn::Module*> all{&module};
  for (const auto& child : module.modules(/*include_self=*/false)) {
    if (std::find(all.begin(), all.end(), child.get()) == all.end()) all.push_back(child.get());
  }
  return all;
}

// Training in which statistics are plain means, while it lives.
class Counting {
 public:
  Counting(const std::vector<torch::nn::Module*>& modules, const std::vector<NormLayer>& layers) {
    for (auto* module : modules) modes_.emplace_back(module, module->is_training());
    for (const NormLayer& layer : layers) {
      before_.push_back({layer, layer.mean.clone(), layer.variance.clone(), layer.count.clone(),
                         *layer.momentum});
    }
  }
  Counting(const Counting&) = delete;
  Counting& operator=(const Counting&) = delete;

  ~Counting() {
    const at::NoGradGuard no_grad;
    for (const Before& before : before_) {
      *before.layer.momentum = before.momentum;
      if (before.is_updated) continue;
      before.layer.mean.copy_(before.mean);
      before.layer.variance.copy_(before.variance);
      before.layer.count.copy_(before.count);
    }
    // Each sets the modes of what is below it, too.
    for (const auto& [module, is_training] : modes_) module->train(is_training);
  }

  void begin() {
    for (const auto& [layer, mean, variance, count, momentum, is_updated] : before_) {
      layer.momentum->reset();
      layer.mean.zero_();
      layer.variance.fill_(1);
      layer.count.zero_();
    }
    modes_.front().first->train();
  }

  // The layer's statistics stay as they are now.
  void keep(size_t layer) { before_[layer].is_updated = true; }

 private:
  struct Before {
    NormLayer layer;
    at::Tensor mean, variance, count;
    std::optional<double> momentum;
    bool is_updated = false;
  };

  std::vector<Before> before_;
  std::vector<std::pair<torch::nn::Module*, bool>> modes_;
};

// Of each layer the sums over its batches, in float64: means, variances, number of batches.
at::Tensor sums_of(const std::vector<NormLayer>& layers) {
  std::vector<at::Tensor> all;
  for (const NormLayer& layer : layers) {
    const at::Tensor count = layer.count.to(at::kDouble).reshape({1});
    all.insert(all.end(), {layer.mean.to(at::kDouble).mul(count),
                           layer.variance.to(at::kDouble).mul(count), count});
  }
  return at::cat(all);
}

}  // namespace

size_t update_batch_norm(torch::nn::Module& module, const Group& group,
                         const std::function<void()>& run) {
  refuse_lanes(group, "update_batch_norm",
               "call it with World::solo(), and with all batches on each rank");
  group.refuse_python_ranks("update_batch_norm");
  if (!run) throw ConfigError("[update_batch_norm] the function that takes batches is empty");
  const auto modules = modules_of(module);
  std::vector<NormLayer> layers;
  for (auto* each : modules) {
    add_layer<1>(*each, layers);
    add_layer<2>(*each, layers);
    add_layer<3>(*each, layers);
  }
  if (layers.empty()) return 0;
  const at::NoGradGuard no_grad;
  Counting counting(modules, layers);
  counting.begin();
  run();
  const at::Tensor sums = sums_of(layers);
  group.all_reduce(sums, ReduceOp::Sum, {.label = "update_batch_norm"}).wait();
  int64_t at = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    const NormLayer& layer = layers[i];
    const int64_t channels = layer.mean.numel();
    const auto count = sums[at + 2 * channels].item<double>();
    if (count > 0) {
      layer.mean.copy_(sums.narrow(0, at, channels).div(count));
      layer.variance.copy_(sums.narrow(0, at + channels, channels).div(count));
      layer.count.fill_(count / layer.ranks);
      counting.keep(i);
    }
    at += 2 * channels + 1;
  }
  return layers.size();
}

}  // namespace lockstep::parallel
