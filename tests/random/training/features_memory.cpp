// Programs that give parameters and gradients other memory, as those do that swap averages in or
// exchange the weights of two layers.
#include <torch/torch.h>

#include <algorithm>
#include <stdexcept>

#include "random/training/features.h"

namespace lockstep::test::training {
namespace {

using Pair = std::pair<at::Tensor, at::Tensor>;

// Each once: tied parameters are listed twice.
std::vector<at::Tensor> parameters_of(const Net& net) {
  std::vector<at::Tensor> all;
  for (const auto& parameter : net.parameters()) {
    const auto is_it = [&](const at::Tensor& other) { return other.is_same(parameter); };
    if (std::ranges::none_of(all, is_it)) all.push_back(parameter);
  }
  return all;
}

// Of parameters that could be each other's, a pair; none where there are no such.
std::optional<Pair> pair_of(const Net& net, Random random) {
  std::vector<Pair> pairs;
  const auto all = parameters_of(net);
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = i + 1; j < all.size(); ++j) {
      const auto is_sparse = [](const at::Tensor& parameter) {
        return parameter.grad().defined() && parameter.grad().is_sparse();
      };
      if (all[i].sizes() == all[j].sizes() && all[i].strides() == all[j].strides() &&
          all[i].scalar_type() == all[j].scalar_type() && !is_sparse(all[i]) &&
          !is_sparse(all[j])) {
        pairs.emplace_back(all[i], all[j]);
      }
    }
  }
  if (pairs.empty()) return std::nullopt;
  return pairs[static_cast<size_t>(random.below(std::ssize(pairs)))];
}

// Between two steps, in one of them: the values stay, or two parameters have each other's.
struct MovedParameters : Feature {
  explicit MovedParameters(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  void begin_step(Training& training) override {
    Random random(seed);
    if (training.step != random.below(training.program.steps)) return;
    const bool swaps = random.chance(0.5);
    for (auto& lane : training.lanes) {
      for (auto& model : lane.models) {
        Random same(random);
        if (const auto pair = pair_of(*model.net, same); swaps && pair) {
          const at::Tensor first = pair->first.detach();
          pair->first.set_data(pair->second.detach());
          pair->second.set_data(first);
          continue;
        }
        for (const auto& parameter : parameters_of(*model.net)) {
          if (same.chance(0.5)) parameter.set_data(parameter.detach().clone());
        }
      }
    }
  }
  uint64_t seed;
};

// Before the optimizer steps, each time.
struct MovedGradients : Feature {
  explicit MovedGradients(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  void after_backward(Training& training) override {
    Random random(seed + static_cast<uint64_t>(training.step));
    const bool swaps = random.chance(0.5);
    for (Lane* lane : training.stepping()) {
      for (auto& model : lane->models) {
        Random same(random);
        if (const auto pair = pair_of(*model.net, same); swaps && pair) {
          std::swap(pair->first.mutable_grad(), pair->second.mutable_grad());
          continue;
        }
        for (const auto& parameter : parameters_of(*model.net)) {
          if (same.chance(0.5) && parameter.grad().defined()) {
            parameter.mutable_grad() = parameter.grad().clone();
          }
        }
      }
    }
  }
  uint64_t seed;
};

// Somebody keeps the gradients of each step, which have to stay as they are once others have taken
// their places.
struct KeptGradients : Feature {
  explicit KeptGradients(const Part&) {}
  static bool applies(const Program&) { return true; }
  void after_step(Training& training) override {
    if (training.alone) return;
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i].defined() &&
          !at::allclose(dense(kept[i]), values[i], 0, 0, /*equal_nan=*/true)) {
        throw std::runtime_error("a gradient that was kept has other values now");
      }
    }
    kept.clear();
    values.clear();
    for (const auto& parameter : training.lanes[0].parameters()) kept.push_back(parameter.grad());
  }
  // Those are cleared that are to be.
  void loss(Training& training, Lane&, const at::Tensor&, at::Tensor&) override {
    if (training.alone || !values.empty()) return;
    const auto parameters = training.lanes[0].parameters();
    for (size_t i = 0; i < kept.size(); ++i) {
      const at::Tensor& now = parameters[i].grad();
      const bool is_added_to =
          kept[i].defined() && now.defined() &&
          (now.is_same(kept[i]) ||
           (now.has_storage() && kept[i].has_storage() && now.is_alias_of(kept[i])));
      values.push_back(kept[i].defined() && !is_added_to ? dense(kept[i]).clone() : at::Tensor());
    }
  }
  static at::Tensor dense(const at::Tensor& gradient) {
    return gradient.is_sparse() ? gradient.to_dense() : gradient;
  }
  std::vector<at::Tensor> kept, values;
};

}  // namespace

void add_memory_features(std::vector<FeatureKind>& kinds) {
  kinds.push_back(feature<MovedParameters>("move_parameters", Splits::Yes));
  kinds.push_back(feature<MovedGradients>("move_gradients", Splits::Yes));
  kinds.push_back(feature<KeptGradients>("keep_gradients", Splits::Yes));
}

}  // namespace lockstep::test::training
