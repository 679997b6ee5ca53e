// What happens to gradients around a backward: cleared, scaled, clipped, with history.
#include <torch/torch.h>

#include "lockstep/parallel/clip.h"
#include "lockstep/parallel/grad_scaler.h"
#include "random/training/features.h"

namespace lockstep::test::training {
namespace {

// Every step in its own way, or not at all.
struct Clearing : Feature {
  explicit Clearing(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  bool clear(Training& training, Lane&, Model& model) override {
    Random random(seed + static_cast<uint64_t>(training.step));
    // Within a Join a rank without a batch has none of what is left of earlier gradients.
    const auto kind = training.program.has("join") ? 2 * random.below(2) : random.below(6);
    if (kind == 4) return true;
    // In one process ddp.zero_grad() is this, too.
    if (kind == 5) return false;
    const bool sharded = training.program.has("fsdp");  // whose module's cannot become zeros
    if (kind < 2) {
      model.optimizer->zero_grad(/*set_to_none=*/kind == 0);
    } else {
      model.net->zero_grad(/*set_to_none=*/kind == 2 || sharded);
    }
    model.reached.clear();
    return true;
  }
  uint64_t seed;
};

struct CreateGraph : Feature {
  explicit CreateGraph(const Part&) {}
  static bool applies(const Program&) { return true; }
  bool backward(Training&, const at::Tensor& loss) override {
    loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    return true;
  }
};

// A part of the loss that is computed from its gradients.
struct GradientPenalty : Feature {
  explicit GradientPenalty(const Part&) {}
  static bool applies(const Program&) { return true; }
  // A second derivative reads parameters after their unit's backward.
  void around_forward(Training& training, const std::function<void()>& forward) override {
    const Model& model = training.lanes[0].models[static_cast<size_t>(training.model)];
    if (model.fsdp) model.fsdp->unshard();
    forward();
  }
  void loss(Training& training, Lane& lane, const at::Tensor&, at::Tensor& loss) override {
    Model& model = lane.models[static_cast<size_t>(training.model)];
    std::vector<at::Tensor> parameters;
    for (const auto& parameter : model.net->parameters()) {
      if (parameter.requires_grad()) parameters.push_back(parameter);
    }
    const auto reached = model.reached;
    const auto earlier = model.earlier;
    const auto gradients = torch::autograd::grad({loss}, parameters, {}, /*retain_graph=*/true,
                                                 /*create_graph=*/true, /*allow_unused=*/true);
    // No gradient was accumulated.
    model.reached = reached;
    model.earlier = earlier;
    for (const auto& gradient : gradients) {
      if (gradient.defined()) loss = loss + 0.01 * gradient.abs().square().sum().to(at::kDouble);
    }
  }
};

// Of some parameters only.
struct BackwardInputs : Feature {
  explicit BackwardInputs(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  bool backward(Training& training, const at::Tensor& loss) override {
    std::vector<at::Tensor> inputs;
    for (Lane* lane : training.active()) {
      for (size_t i = 0; i < lane->models.size(); ++i) {
        const bool is_reached = training.is_joint || static_cast<int>(i) == training.model;
        if (is_reached) add_inputs(*lane->models[i].net, training.step, inputs);
      }
    }
    torch::autograd::backward({loss}, {}, /*retain_graph=*/false, /*create_graph=*/false, inputs);
    return true;
  }
  void add_inputs(const Net& net, int step, std::vector<at::Tensor>& inputs) const {
    Random random(seed + static_cast<uint64_t>(step));
    for (const auto& item : net.named_parameters()) {
      const bool chosen = item.key() == "head" || random.chance(0.6);
      if (chosen && item.value().requires_grad()) inputs.push_back(item.value());
    }
  }
  uint64_t seed;
};

// The same graph twice.
struct BackwardTwice : Feature {
  explicit BackwardTwice(const Part&) {}
  static bool applies(const Program&) { return true; }
  bool backward(Training& training, const at::Tensor& loss) override {
    loss.backward({}, /*retain_graph=*/true);
    if (training.alone && training.round == 0) average(training, training.model);
    loss.backward();
    return true;
  }
};

// Between steps users put tensors of their own in the gradients' place.
struct GradientClones : Feature {
  explicit GradientClones(const Part&) {}
  static bool applies(const Program&) { return true; }
  void after_step(Training& training) override {
    const at::NoGradGuard no_grad;
    for (Lane* lane : training.stepping()) {
      for (const auto& parameter : lane->parameters()) {
        if (parameter.grad().defined()) parameter.mutable_grad() = parameter.grad().clone();
      }
    }
  }
};

struct ClipNorm : Feature {
  explicit ClipNorm(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  void after_backward(Training& training) override {
    Random random(seed);
    const double most = random.pick({0.05, 0.5, 5.0});
    const double type = random.pick({2.0, 1.0, std::numeric_limits<double>::infinity()});
    for (Lane* lane : training.stepping()) {
      if (!training.program.has("fsdp")) {
        parallel::clip_grad_norm_(lane->parameters(), most, {.norm_type = type});
        continue;
      }
      for (Model& model : lane->models) {
        if (model.fsdp) {
          model.fsdp->clip_grad_norm_(most, type);
        } else {
          auto parameters = model.net->parameters();
          std::erase_if(parameters, [&](const at::Tensor& parameter) {
            return is_ignored(training, *model.net, parameter);
          });
          parallel::clip_grad_norm_(parameters, most, {.norm_type = type});
        }
      }
    }
  }
  uint64_t seed;
};

struct ClipValue : Feature {
  explicit ClipValue(const Part&) {}
  static bool applies(const Program&) { return true; }
  void after_backward(Training& training) override {
    for (Lane* lane : training.stepping()) parallel::clip_grad_value_(lane->parameters(), 0.02);
  }
};

// Losses are scaled; in some step one rank's overflows, and no rank makes the step.
struct Scaling : Feature {
  explicit Scaling(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  void begin(Training& training) override {
    Random random(seed);
    overflow_step = static_cast<int>(random.below(training.program.steps + 1));
    overflow_lane = static_cast<int>(random.below(training.program.parts()));
    unscales = random.chance(0.5);
    for (size_t i = 0; i < training.lanes.size(); ++i) {
      scalers.push_back(std::make_unique<parallel::GradScaler>(
          training.group, parallel::GradScalerOptions{.init_scale = 1024, .growth_interval = 2}));
      // In one process nobody else tells that there was a loss.
      if (training.alone) scalers.back()->scale(at::ones({}));
    }
  }
  void loss(Training& training, Lane& lane, const at::Tensor&, at::Tensor& loss) override {
    if (training.step == overflow_step && lane.rank == overflow_lane) {
      loss = loss * std::numeric_limits<double>::infinity();
    }
    loss = scaler_of(training, lane).scale(loss);
  }
  void after_backward(Training& training) override {
    found.clear();
    if (!unscales) return;
    find_overflows(training);
    for (Lane* lane : training.stepping()) {
      for (Model& model : lane->models) {
        with_overflow(training, *lane, model,
                      [&] { scaler_of(training, *lane).unscale_(*model.optimizer); });
      }
    }
  }
  bool update(Training& training, Lane& lane, Model& model) override {
    if (unscales) {
      scaler_of(training, lane).step(*model.optimizer);
      return true;
    }
    if (found.empty()) find_overflows(training);
    with_overflow(training, lane, model, [&] { scaler_of(training, lane).step(*model.optimizer); });
    return true;
  }
  void after_step(Training& training) override {
    for (Lane* lane : training.stepping()) {
      scaler_of(training, *lane).update();
      lane->losses.push_back(scaler_of(training, *lane).factor());
    }
  }
  static bool overflows(const Model& model) {
    return !std::ranges::all_of(gradients_of(model), [](const at::Tensor& gradient) {
      return at::isfinite(gradient).all().item<bool>();
    });
  }
  void find_overflows(Training& training) {
    found.assign(static_cast<size_t>(training.models), false);
    for (Lane* lane : training.stepping()) {
      for (size_t i = 0; i < found.size(); ++i) found[i] = found[i] || overflows(lane->models[i]);
    }
  }
  // In one process what another rank finds is found here, too.
  void with_overflow(Training& training, Lane& lane, const Model& model,
                     const std::function<void()>& unscale) {
    const at::NoGradGuard no_grad;
    const bool is_found = found.at(static_cast<size_t>(&model - lane.models.data()));
    at::Tensor spoilt, value;
    if (training.alone && is_found && !overflows(model)) {
      spoilt = gradients_of(model).at(0);
      value = spoilt / scaler_of(training, lane).factor();
      spoilt.fill_(std::numeric_limits<double>::infinity());
    }
    unscale();
    if (spoilt.defined()) spoilt.copy_(value);
  }
  static std::vector<at::Tensor> gradients_of(const Model& model) {
    std::vector<at::Tensor> all;
    for (const auto& group : model.optimizer->param_groups()) {
      for (const auto& parameter : group.params()) {
        const at::Tensor& gradient = parameter.grad();
        if (!gradient.defined() || gradient.numel() == 0) continue;
        all.push_back(gradient.is_sparse() ? gradient._values() : gradient);
      }
    }
    return all;
  }
  parallel::GradScaler& scaler_of(Training& training, Lane& lane) {
    return *scalers[&lane - training.lanes.data()];
  }
  uint64_t seed;
  int overflow_step = 0, overflow_lane = 0;
  bool unscales = false;
  std::vector<bool> found;  // in the step, by model
  std::vector<std::unique_ptr<parallel::GradScaler>> scalers;
};

}  // namespace

void add_gradient_features(std::vector<FeatureKind>& kinds) {
  kinds.push_back(feature<Clearing>("zero_grad", Splits::Yes));
  kinds.push_back(feature<GradientPenalty>("penalty", Splits::No));
  kinds.push_back(feature<BackwardInputs>("inputs", Splits::Yes));
  kinds.push_back(feature<BackwardTwice>("backward_twice", Splits::Yes));
  kinds.push_back(feature<GradientClones>("gradient_clones", Splits::Yes));
  kinds.push_back(feature<CreateGraph>("create_graph", Splits::Yes));
  kinds.push_back(feature<Scaling>("grad_scaler", Splits::No));
  kinds.push_back(feature<ClipNorm>("clip_norm", Splits::Yes));
  kinds.push_back(feature<ClipValue>("clip_value", Splits::Yes));
}

}  // namespace lockstep::test::training
