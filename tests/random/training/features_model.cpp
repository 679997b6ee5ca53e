// What a model may be besides its layers: several of them, frozen, tied or unused parameters.
#include <torch/torch.h>

#include "random/training/features.h"

namespace lockstep::test::training {
namespace {

struct TwoModels : Feature {
  explicit TwoModels(const Part&) {}
  static bool applies(const Program&) { return true; }
  void plan(Training& training) override { training.models = 2; }
};

// Two forwards before their one backward.
struct TwoForwards : Feature {
  explicit TwoForwards(const Part&) {}
  static bool applies(const Program&) { return true; }
};

// One backward of the sum of both models' losses.
struct Joint : Feature {
  explicit Joint(const Part&) {}
  static bool applies(const Program&) { return true; }
  void plan(Training& training) override {
    training.models = 2;
    training.is_joint = true;
  }
};

// Blocks that are left out by some ranks, in some steps, or by all and always.
struct UnusedBlocks : Feature {
  explicit UnusedBlocks(const Part& part) : seed(part.seed) {}
  static bool applies(const Program& program) { return !program.layers.empty(); }
  void build(Training& training, Lane&, Net& net) override {
    // Under Fsdp all ranks call the same units.
    const bool alike = training.program.has("fsdp");
    net.skips = [seed = seed, alike](size_t block, Moment moment) {
      if (alike) moment.lane = 0;
      Random random(seed + block);
      const auto phase = random.below(3);
      switch (random.below(7)) {
        case 0:
          return (moment.lane + phase) % 2 == 0;
        case 1:
          return (moment.step + phase) % 2 == 0;
        case 2:
          return (moment.lane + moment.step + phase) % 3 == 0;
        case 3:
          return moment.micro % 10 == 0;
        case 4:
          return true;
        default:
          return false;
      }
    };
  }
  uint64_t seed;
};

struct Frozen : Feature {
  explicit Frozen(const Part& part) : seed(part.seed) {}
  static bool applies(const Program& program) { return !program.layers.empty(); }
  void build(Training&, Lane&, Net& net) override {
    Random random(seed);
    for (const auto& item : net.named_parameters()) {
      if (item.key() != "head" && random.chance(0.3)) item.value().set_requires_grad(false);
    }
  }
  uint64_t seed;
};

// Two blocks of one kind are one block.
struct Tied : Feature {
  explicit Tied(const Part&) {}
  static bool applies(const Program& program) {
    for (size_t i = 0; i < program.layers.size(); ++i) {
      for (size_t j = i + 1; j < program.layers.size(); ++j) {
        if (program.layers[i].name == program.layers[j].name) return true;
      }
    }
    return false;
  }
  void build(Training& training, Lane&, Net& net) override {
    const auto& layers = training.program.layers;
    for (size_t i = 0; i < layers.size(); ++i) {
      for (size_t j = i + 1; j < layers.size(); ++j) {
        if (layers[i].name == layers[j].name) return net.tie(i, j);
      }
    }
  }
};

// Hooks of the user's on parameters: they see a rank's own gradient.
struct TensorHooks : Feature {
  explicit TensorHooks(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  void build(Training&, Lane& lane, Net& net) override {
    Random random(seed);
    const double factor = 1.0 + lane.rank;
    for (const auto& item : net.named_parameters()) {
      if (!item.value().requires_grad() || random.chance(0.5)) continue;
      item.value().register_hook(
          [factor](const at::Tensor& gradient) { return gradient * factor; });
    }
  }
  uint64_t seed;
};

// Between two steps, as when somebody looks at a validation set.
struct Evaluation : Feature {
  explicit Evaluation(const Part&) {}
  static bool applies(const Program&) { return true; }
  void after_step(Training& training) override {
    const at::NoGradGuard no_grad;
    for (size_t model = 0; model < static_cast<size_t>(training.models); ++model) {
      std::vector<Net*> nets;
      std::vector<Batch> batches;
      std::vector<Moment> moments;
      for (Lane* lane : training.stepping()) {
        nets.push_back(lane->models[model].net.get());
        nets.back()->eval();
        batches.push_back({at::ones({2, kFeatures}, at::kDouble), {}});
        const int part = training.program.lanes() > 0 ? 0 : lane->rank;
        moments.push_back({.lane = part, .lanes = 1, .step = 0, .micro = 0, .seed = 0});
      }
      const auto outputs = Net::forward(nets, batches, moments);
      size_t i = 0;
      for (Lane* lane : training.stepping()) {
        lane->losses.push_back(outputs[i++].sum().item<double>());
      }
      for (Net* net : nets) net->train();
    }
  }
};

}  // namespace

void add_model_features(std::vector<FeatureKind>& kinds) {
  kinds.push_back(feature<TwoModels>("two_models", Splits::Yes));
  kinds.push_back(feature<TwoForwards>("two_forwards", Splits::Yes));
  kinds.push_back(feature<Joint>("joint", Splits::Yes));
  kinds.push_back(feature<UnusedBlocks>("unused", Splits::No));
  kinds.push_back(feature<Frozen>("frozen", Splits::Yes));
  kinds.push_back(feature<Tied>("tied", Splits::Yes));
  kinds.push_back(feature<TensorHooks>("tensor_hooks", Splits::No));
  kinds.push_back(feature<Evaluation>("evaluation", Splits::No));
}

}  // namespace lockstep::test::training
