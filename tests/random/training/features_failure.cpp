// A backward() that throws, after which the step is made as if it had not been.
#include <torch/torch.h>

#include <stdexcept>

#include "lockstep/core/shard.h"
#include "lockstep/parallel/lanes.h"
#include "random/training/features.h"

namespace lockstep::test::training {
namespace {

constexpr int kMicro = 90;  // no other backward has this number

struct Mine : std::runtime_error {
  Mine() : std::runtime_error("mine") {}
};

struct Thrown : Feature {
  explicit Thrown(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  void begin_step(Training& training) override {
    Random random(seed);
    if (training.step != random.below(training.program.steps)) return;
    // With lanes Ddp is to be told.
    const bool has_lanes = training.program.lanes() > 0;
    const bool clears_by_module = random.chance(0.5) && !has_lanes, holds = random.chance(0.3);
    for (size_t model = 0; model < static_cast<size_t>(training.models); ++model) {
      // All blocks run, so that the chosen parameter has a gradient.
      std::vector<Skips> skips;
      for (Lane* lane : training.active()) {
        skips.push_back(std::exchange(lane->models[model].net->skips, {}));
      }
      if (training.alone) {
        // What lanes leave in buffers is forgotten with them.
        if (!has_lanes) forward(training, training.active(), model);
      } else {
        Model& own = training.lanes[0].models[model];
        std::optional<parallel::Hold> hold;
        if (holds) hold.emplace(own.hold());
        Random same(random);
        const auto parameter = chosen(*own.net, same);
        // Outside of hold() in the last lane that a rank has, where all ranks are in the pass.
        const bool waits = has_lanes && !holds;
        const Group& group = training.group;
        const Range lanes = Shard{group.rank(), group.size()}.of(training.program.lanes());
        const auto hook =
            parameter.register_hook([&, waits, lanes](const at::Tensor& gradient) -> at::Tensor {
              if (waits && training.lanes[0].rank + 1 < lanes.end) return gradient;
              throw Mine();
            });
        bool threw = false;
        try {
          run_backward(training, model);
        } catch (const std::exception& error) {
          threw = std::string(error.what()).find("mine") != std::string::npos;
          if (!threw) throw;
        }
        parameter.remove_hook(hook);
        if (!threw) throw std::logic_error("a backward() should have thrown");
      }
      size_t i = 0;
      for (Lane* lane : training.active()) {
        Model& own = lane->models[model];
        own.net->skips = skips[i++];
        if (own.fsdp) {
          own.fsdp->zero_grad();
        } else if (own.ddp && !clears_by_module) {
          own.ddp->zero_grad();
        } else {
          own.net->zero_grad();
        }
        own.reached.clear();
        own.earlier.clear();
      }
    }
  }
  static at::Tensor chosen(const Net& net, Random& random) {
    std::vector<at::Tensor> all;
    for (const auto& parameter : net.parameters()) {
      if (parameter.requires_grad()) all.push_back(parameter);
    }
    return all.at(static_cast<size_t>(random.below(std::ssize(all))));
  }
  static at::Tensor forward(Training& training, const std::vector<Lane*>& lanes, size_t model) {
    std::vector<Net*> nets;
    std::vector<Batch> batches;
    std::vector<Moment> moments;
    for (const Lane* lane : lanes) {
      nets.push_back(lane->models[model].net.get());
      auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(lane->rank));
      batches.push_back({at::randn({3, kFeatures}, generator, at::kDouble), {}});
      moments.push_back(
          {lane->rank, training.program.parts(), training.step, kMicro, training.program.seed});
    }
    return Net::forward(nets, batches, moments).at(0).sum();
  }
  static void run_backward(Training& training, size_t model) {
    Lane& own = training.lanes[0];
    if (training.program.lanes() == 0) {
      forward(training, {&own}, model).backward();
    } else if (own.models[model].fsdp) {
      run_lanes_of(training, model, *own.models[model].fsdp);
    } else {
      run_lanes_of(training, model, *own.models[model].ddp);
    }
  }
  template <class Parallel>
  static void run_lanes_of(Training& training, size_t model, Parallel& parallel) {
    Lane& own = training.lanes[0];
    const int rank = own.rank;
    try {
      for (const lockstep::Lane lane :
           parallel.lanes(StepKey{.seed = training.program.seed, .step = training.step})) {
        own.rank = static_cast<int>(lane.index);
        forward(training, {&own}, model).backward();
      }
    } catch (...) {
      own.rank = rank;
      throw;
    }
    own.rank = rank;
  }
  uint64_t seed;
};

}  // namespace

void add_failure_features(std::vector<FeatureKind>& kinds) {
  kinds.push_back(feature<Thrown>("thrown", Splits::No));
}

}  // namespace lockstep::test::training
