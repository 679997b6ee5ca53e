// What drives an optimizer: the division over ranks, schedules.
#include <torch/torch.h>

#include "lockstep/parallel/lr_scheduler.h"
#include "lockstep/parallel/metrics.h"
#include "random/training/features.h"

namespace lockstep::test::training {
namespace {

// attach() in training.cpp makes it.
struct Zero : Feature {
  explicit Zero(const Part&) {}
  static bool applies(const Program&) { return true; }
};

// In the place of the program's optimizer: the loss is computed several times a step.
struct LineSearch : Feature {
  explicit LineSearch(const Part& part) : seed(part.seed) {}
  static bool applies(const Program& program) {
    // Of another dtype, sparse, or of strides that libtorch's does not flatten.
    const std::vector<std::string> unfit{"complex",   "embedding_sparse",  "linear_bf",
                                         "linear_fl", "linear_transposed", "conv_channels_last"};
    return std::ranges::none_of(unfit,
                                [&](const std::string& layer) { return program.has_layer(layer); });
  }
  void begin(Training& training) override {
    Random random(seed);
    auto options = torch::optim::LBFGSOptions(0.1).max_iter(3).history_size(2);
    if (random.chance(0.5)) options.line_search_fn("strong_wolfe");
    for (auto& lane : training.lanes) {
      for (auto& model : lane.models) {
        std::vector<at::Tensor> parameters;
        for (const auto& group : model.optimizer->param_groups()) {
          parameters.insert(parameters.end(), group.params().begin(), group.params().end());
        }
        searches.push_back(std::make_unique<torch::optim::LBFGS>(parameters, options));
      }
    }
  }
  bool update(Training& training, Lane& lane, Model& model) override {
    const auto number = static_cast<size_t>(&model - lane.models.data());
    training.model = static_cast<int>(number);
    searches.at(number)->step([&] {
      model.ddp->zero_grad();
      const at::Tensor loss = losses(training, {&lane}, number, /*micro=*/70);
      loss.backward();
      return parallel::global_loss(loss, training.group);
    });
    return true;
  }
  uint64_t seed;
  std::vector<std::unique_ptr<torch::optim::LBFGS>> searches;
};

// Two, with rates of their own; attach() makes them.
struct ParameterGroups : Feature {
  explicit ParameterGroups(const Part&) {}
  static bool applies(const Program&) { return true; }
};

struct Schedules : Feature {
  explicit Schedules(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  void begin(Training& training) override {
    for (auto& lane : training.lanes) {
      for (auto& model : lane.models) {
        schedulers.emplace_back(
            &lane, std::make_unique<parallel::LrScheduler>(*model.optimizer, schedule()));
      }
    }
  }
  void after_step(Training& training) override {
    for (auto& [lane, scheduler] : schedulers) {
      if (lane->active || training.rules.everybody_rests) scheduler->step();
    }
  }
  parallel::Schedule schedule() const {
    using namespace parallel;
    Random random(seed);
    switch (random.below(7)) {
      case 0:
        return constant_lr({.steps = 2});
      case 1:
        return linear_lr({.steps = 3});
      case 2:
        return step_lr({.size = 2, .gamma = 0.5});
      case 3:
        return exponential_lr(0.7);
      case 4:
        return cosine_lr({.steps = 3});
      case 5:
        return cosine_restarts_lr({.first_steps = 2});
      default:
        return sequential_lr({linear_lr({.steps = 1}), step_lr({.size = 1})}, {1});
    }
  }
  uint64_t seed;
  std::vector<std::pair<Lane*, std::unique_ptr<parallel::LrScheduler>>> schedulers;
};

// Every rank has a metric of its own; the rates follow the mean.
struct Plateau : Feature {
  explicit Plateau(const Part&) {}
  static bool applies(const Program&) { return true; }
  void begin(Training& training) override {
    for (auto& lane : training.lanes) {
      for (auto& model : lane.models) {
        plateaus.push_back(std::make_unique<parallel::ReduceLrOnPlateau>(
            *model.optimizer, training.group, parallel::PlateauOptions{.patience = 0}));
      }
    }
  }
  void after_step(Training& training) override {
    const auto metric = [&](int rank) { return 1.0 + rank * training.step % 3; };
    double mean = 0;
    for (int rank = 0; rank < training.program.ranks; ++rank) {
      mean += metric(rank) / training.program.ranks;
    }
    for (auto& plateau : plateaus) {
      plateau->step(training.alone ? mean : metric(training.lanes[0].rank));
    }
  }
  std::vector<std::unique_ptr<parallel::ReduceLrOnPlateau>> plateaus;
};

}  // namespace

void add_optimizer_features(std::vector<FeatureKind>& kinds) {
  kinds.push_back(feature<Zero>("zero", Splits::Yes));
  kinds.push_back(feature<LineSearch>("lbfgs", Splits::No, Compared::Ranks));
  kinds.push_back(feature<ParameterGroups>("param_groups", Splits::Yes));
  kinds.push_back(feature<Schedules>("schedule", Splits::Yes));
  kinds.push_back(feature<Plateau>("plateau", Splits::Yes));
}

}  // namespace lockstep::test::training
