// What is saved, loaded, taken down and put up again while a training continues.
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <stdexcept>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/parallel/check_same.h"
#include "lockstep/parallel/stateful.h"
#include "random/training/features.h"

namespace lockstep::test::training {
namespace {

template <class Saved>
std::string saved(const Saved& object) {
  torch::serialize::OutputArchive archive;
  object.save(archive);
  std::ostringstream out;
  archive.save_to(out);
  return out.str();
}

template <class Loaded>
void load(Loaded& object, const std::string& bytes) {
  std::istringstream in(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(in);
  object.load(archive);
}

// As when a Ddp is constructed.
void become_rank_zeros(Training& training) {
  const at::NoGradGuard no_grad;
  for (auto& lane : training.lanes) {
    for (size_t i = 0; i < lane.models.size() && lane.rank > 0; ++i) {
      const Net& from = *training.lanes[0].models[i].net;
      const auto parameters = from.named_parameters(), buffers = from.named_buffers();
      for (const auto& item : lane.models[i].net->named_parameters()) {
        if (is_ignored(training, *lane.models[i].net, item.value())) continue;
        item.value().copy_(parameters[item.key()]);
      }
      for (const auto& item : lane.models[i].net->named_buffers()) {
        item.value().copy_(buffers[item.key()]);
      }
    }
  }
}

// The first parameters once more, into the modules that Ddp is attached to.
struct LoadWhileAttached : Feature {
  explicit LoadWhileAttached(const Part& part) : seed(part.seed) {}
  static bool applies(const Program& program) { return program.steps > 1; }
  void begin(Training& training) override {
    for (const auto& lane : training.lanes) {
      for (const auto& model : lane.models) first.push_back(saved(*model.net));
    }
  }
  void begin_step(Training& training) override {
    if (training.step != 1 + Random(seed).below(training.program.steps - 1)) return;
    size_t i = 0;
    for (auto& lane : training.lanes) {
      for (auto& model : lane.models) load(*model.net, first[i++]);
    }
  }
  uint64_t seed;
  std::vector<std::string> first;
};

struct OptimizerReload : Feature {
  explicit OptimizerReload(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  void after_step(Training& training) override {
    if (training.step != Random(seed).below(training.program.steps)) return;
    for (auto& lane : training.lanes) {
      for (auto& model : lane.models) load(*model.optimizer, saved(*model.optimizer));
    }
  }
  uint64_t seed;
};

// One rank alone loads, and the others take it over.
struct OptimizerBroadcast : Feature {
  explicit OptimizerBroadcast(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  void after_step(Training& training) override {
    if (training.step != Random(seed).below(training.program.steps)) return;
    for (auto& lane : training.lanes) {
      for (auto& model : lane.models) {
        if (lane.rank == 0) load(*model.optimizer, saved(*model.optimizer));
        if (training.on_rank()) {
          parallel::broadcast_optimizer(*model.optimizer, training.group);
        } else if (lane.rank > 0) {
          const auto number = static_cast<size_t>(&model - lane.models.data());
          load(*model.optimizer, saved(*training.lanes[0].models[number].optimizer));
        }
      }
    }
  }
  uint64_t seed;
};

// Finds nothing.
struct CheckedSame : Feature {
  explicit CheckedSame(const Part&) {}
  static bool applies(const Program&) { return true; }
  void after_step(Training& training) override {
    if (training.alone) return;
    for (auto& model : training.lanes[0].models) {
      parallel::check_same(model.module(), *model.optimizer, training.group);
    }
  }
};

// Another Ddp follows the first, which leaves gradients behind.
struct Reattached : Feature {
  explicit Reattached(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  void begin_step(Training& training) override {
    if (training.step != Random(seed).below(training.program.steps)) return;
    const at::NoGradGuard no_grad;
    for (auto& lane : training.lanes) {
      for (size_t i = 0; i < lane.models.size(); ++i) {
        Model& model = lane.models[i];
        if (training.on_rank()) {
          model.ddp.reset();
          model.ddp = ddp_of(training, model);
        }
      }
    }
    if (training.alone) become_rank_zeros(training);
  }
  uint64_t seed;
};

// Frozen until some step, and then told to Ddp.
struct Unfrozen : Feature {
  explicit Unfrozen(const Part& part) : seed(part.seed) {}
  static bool applies(const Program& program) { return !program.layers.empty(); }
  void build(Training&, Lane&, Net& net) override {
    for (const auto& parameter : chosen(net)) parameter.set_requires_grad(false);
  }
  void begin_step(Training& training) override {
    if (training.step != Random(seed).below(training.program.steps)) return;
    for (auto& lane : training.lanes) {
      for (auto& model : lane.models) {
        for (const auto& parameter : chosen(*model.net)) {
          parameter.set_requires_grad(true);
          if (training.alone) watch(model, parameter);
        }
        if (model.ddp) model.ddp->refresh();
      }
    }
    if (training.alone) become_rank_zeros(training);
  }
  std::vector<at::Tensor> chosen(const Net& net) const {
    std::vector<at::Tensor> some;
    Random random(seed);
    for (const auto& parameter : net.blocks()[0]->parameters()) {
      if (random.chance(0.5)) some.push_back(parameter);
    }
    return some;
  }
  uint64_t seed;
};

// From some step on, and Ddp is not told.
struct FrozenLater : Feature {
  explicit FrozenLater(const Part& part) : seed(part.seed) {}
  static bool applies(const Program& program) { return !program.layers.empty(); }
  void begin_step(Training& training) override {
    Random random(seed);
    if (training.step != random.below(training.program.steps)) return;
    for (auto& lane : training.lanes) {
      Random same(random);
      for (auto& model : lane.models) {
        for (const auto& parameter : model.net->blocks()[0]->parameters()) {
          if (same.chance(0.5)) parameter.set_requires_grad(false);
        }
      }
    }
  }
  uint64_t seed;
};

// Into a folder of its own. What is to be restored is spoilt before.
struct Resumed : Feature {
  explicit Resumed(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  void after_step(Training& training) override {
    Random random(seed);
    if (training.alone || training.step != random.below(training.program.steps)) return;
    CheckpointerOptions options;
    options.async = random.chance(0.5);
    const std::string folder = shared_folder(training.group);
    {
      const auto saving = tracking(training, folder, options);
      saving->save(training.step);
      saving->finish();
    }
    spoil(training.lanes[0]);
    tracking(training, folder, options)->restore_latest();
    training.group.barrier().wait();
    if (training.group.rank() == 0) std::filesystem::remove_all(folder);
  }
  static std::string shared_folder(const Group& group) {
    std::string folder = std::filesystem::temp_directory_path() / "lockstep-random-XXXXXX";
    if (group.rank() == 0 && mkdtemp(folder.data()) == nullptr) {
      throw std::runtime_error("mkdtemp " + folder);
    }
    return group.broadcast_bytes(folder, 0);
  }
  static std::unique_ptr<Checkpointer> tracking(Training& training, const std::string& folder,
                                                const CheckpointerOptions& options) {
    auto checkpoints = std::make_unique<Checkpointer>(training.group, folder, options);
    for (auto& model : training.lanes[0].models) {
      const std::string number = std::to_string(&model - training.lanes[0].models.data());
      if (model.fsdp) {
        checkpoints->track("net" + number, *model.fsdp);
      } else if (model.script) {
        checkpoints->track("net" + number, *model.script);
      } else {
        checkpoints->track("net" + number, *model.net);
      }
      if (model.zero != nullptr) {
        checkpoints->track("optimizer" + number, *model.zero);
      } else {
        checkpoints->track("optimizer" + number, *model.optimizer);
      }
      if (model.average) checkpoints->track("average" + number, *model.average);
      if (model.hook) {
        checkpoints->track("hook" + number, parallel::stateful(*model.hook, training.group));
      }
    }
    return checkpoints;
  }
  static void spoil(Lane& lane) {
    const at::NoGradGuard no_grad;
    for (auto& model : lane.models) {
      for (const auto& parameter : model.parameters()) parameter.fill_(0.5);
      for (const auto& buffer : model.net->buffers()) buffer.fill_(3);
      if (model.average) model.average->update();
      for (auto& group : model.optimizer->param_groups()) group.options().set_lr(77);
      if (model.zero == nullptr) model.optimizer->state().clear();
    }
  }
  uint64_t seed;
};

// A group of the same ranks, of its own.
struct SplitGroup : Feature {
  explicit SplitGroup(const Part&) {}
  static bool applies(const Program&) { return true; }
  void plan(Training& training) override {
    if (training.on_rank()) training.group = training.group.split(0, training.group.rank());
  }
};

// The last weights are averages of those of all steps.
struct AveragedWeights : Feature {
  explicit AveragedWeights(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  void begin(Training& training) override {
    Random random(seed);
    const parallel::WeightAverageOptions options{
        .decay = random.chance(0.5) ? std::optional(0.7) : std::nullopt,
        .start = random.between(0, 1),
        .every = random.between(1, 2)};
    for (auto& lane : training.lanes) {
      for (auto& model : lane.models) {
        model.average = std::make_unique<parallel::WeightAverage>(model.parameters(), options);
      }
    }
  }
  void after_step(Training& training) override {
    const at::NoGradGuard no_grad;
    for (auto& lane : training.lanes) {
      for (auto& model : lane.models) {
        model.average->update();
        { const auto applied = model.average->apply(); }  // leaves no trace
        if (training.step + 1 < training.program.steps) continue;
        const auto weights = model.parameters();
        for (size_t i = 0; i < weights.size(); ++i) weights[i].copy_(model.average->averages()[i]);
      }
    }
  }
  uint64_t seed;
};

}  // namespace

void add_lifetime_features(std::vector<FeatureKind>& kinds) {
  kinds.push_back(feature<LoadWhileAttached>("load", Splits::Yes));
  kinds.push_back(feature<Unfrozen>("refresh", Splits::Yes));
  kinds.push_back(feature<FrozenLater>("freeze_later", Splits::Yes));
  kinds.push_back(feature<OptimizerReload>("optimizer_reload", Splits::Yes));
  kinds.push_back(feature<OptimizerBroadcast>("optimizer_broadcast", Splits::Yes));
  kinds.push_back(feature<CheckedSame>("check_same", Splits::Yes));
  kinds.push_back(feature<Reattached>("reattach", Splits::Yes));
  kinds.push_back(feature<Resumed>("resume", Splits::Yes));
  kinds.push_back(feature<SplitGroup>("split_group", Splits::Yes));
  kinds.push_back(feature<AveragedWeights>("weight_average", Splits::Yes));
}

}  // namespace lockstep::test::training
