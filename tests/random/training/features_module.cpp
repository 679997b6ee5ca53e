// What is done to modules: recomputed ones, a scripted one in the net's place, statistics that are
// computed anew.
#include <torch/torch.h>

#include <set>

#include "lockstep/parallel/activation_checkpointing.h"
#include "lockstep/parallel/update_batch_norm.h"
#include "random/training/features.h"

namespace lockstep::test::training {
namespace {

// Some of the modules on ranks, the first block among them.
struct Recomputed : Feature {
  explicit Recomputed(const Part& part) : seed(part.seed) {}
  static bool applies(const Program& program) { return !program.layers.empty(); }
  void begin(Training& training) override {
    if (training.alone) return;
    for (auto& model : training.lanes[0].models) {
      Random random(seed);
      std::set<std::shared_ptr<torch::nn::Module>> chosen{model.net->blocks()[0]};
      for (const auto& module : model.net->modules(/*include_self=*/false)) {
        if (random.chance(0.4)) chosen.insert(module);
      }
      attached.emplace_back(std::vector(chosen.begin(), chosen.end()));
    }
  }
  uint64_t seed;
  std::vector<parallel::ActivationCheckpointing> attached;
};

// attach() makes it.
struct Scripted : Feature {
  explicit Scripted(const Part&) {}
  static bool applies(const Program&) { return true; }
};

torch::jit::Module script_like(const torch::nn::Module& module,
                               const std::shared_ptr<torch::jit::CompilationUnit>& unit) {
  if (const auto* block = dynamic_cast<const Block*>(&module)) {
    if (block->script() != nullptr) return *block->script();
  }
  const bool is_norm = dynamic_cast<const torch::nn::BatchNorm1dImpl*>(&module) != nullptr;
  torch::jit::Module made(
      is_norm ? "__torch__.torch.nn.modules.batchnorm.BatchNorm1d" : "__torch__.Part", unit,
      /*shouldMangle=*/true);
  if (is_norm) made.register_attribute("training", c10::BoolType::get(), true);
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    made.register_parameter(item.key(), item.value(), /*is_buffer=*/false);
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    made.register_buffer(item.key(), item.value());
  }
  for (const auto& item : module.named_children()) {
    made.register_module(item.key(), script_like(*item.value(), unit));
  }
  return made;
}

// In some step, of batches of which each rank has its own number.
struct BatchNormUpdate : Feature {
  explicit BatchNormUpdate(const Part& part) : seed(part.seed) {}
  static bool applies(const Program& program) {
    const auto is = [&](std::string_view name) { return program.has_layer(name); };
    return is("batch_norm") && !is("sync_batch_norm") && !is("gathered") && !is("counter") &&
           !is("script");
  }
  void after_step(Training& training) override {
    if (training.step != Random(seed).below(training.program.steps)) return;
    for (size_t model = 0; model < static_cast<size_t>(training.models); ++model) {
      std::vector<Net*> nets;
      for (Lane* lane : training.stepping()) {
        nets.push_back(lane->models[model].net.get());
        const bool by_itself = training.alone || training.program.lanes() > 0;
        parallel::update_batch_norm(*nets.back(), by_itself ? Group() : training.group,
                                    [&] { run(training, *lane, *nets.back()); });
      }
      if (training.alone && training.program.lanes() == 0) combine(nets);
    }
  }
  // With lanes each rank takes all batches.
  void run(const Training& training, const Lane& lane, Net& net) const {
    const int parts = training.program.parts();
    const Skips skips = std::exchange(net.skips, {});
    for (int part = 0; part < parts; ++part) {
      if (training.program.lanes() == 0 && part != lane.rank) continue;
      const int count = training.program.has("fsdp") ? 2 : 1 + part % 3;
      for (int i = 0; i < count; ++i) {
        auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(10 * part + i));
        Net::forward({&net}, {{at::randn({3, kFeatures}, generator, at::kDouble), {}}},
                     {{part, parts, training.step, 80 + i, training.program.seed}});
      }
    }
    net.skips = skips;
  }
  static void combine(const std::vector<Net*>& nets) {
    const at::NoGradGuard no_grad;
    // Of all lanes, a tied one by its last name.
    std::map<std::string, std::vector<torch::nn::BatchNorm1dImpl*>> layers;
    for (const Net* net : nets) {
      std::map<torch::nn::BatchNorm1dImpl*, std::string> names;
      for (const auto& item : net->named_modules()) {
        if (auto* norm = item.value()->as<torch::nn::BatchNorm1d>()) names[norm] = item.key();
      }
      for (const auto& [norm, name] : names) layers[name].push_back(norm);
    }
    for (const auto& [name, norms] : layers) {
      at::Tensor count = at::zeros({}, at::kDouble);  // to(kDouble) has made the layers' so, too
      at::Tensor mean = at::zeros({kFeatures}, at::kDouble), variance = mean.clone();
      for (auto* norm : norms) {
        count += norm->num_batches_tracked;
        mean += norm->running_mean * norm->num_batches_tracked;
        variance += norm->running_var * norm->num_batches_tracked;
      }
      if (count.item<int64_t>() == 0) continue;
      for (auto* norm : norms) {
        norm->num_batches_tracked.copy_(count);
        norm->running_mean.copy_(mean / count);
        norm->running_var.copy_(variance / count);
      }
    }
  }
  uint64_t seed;
};

}  // namespace

torch::jit::Module script_of(Training& training, const Net& net) {
  training.options.sparse.clear();
  for (const auto& item : net.named_modules()) {
    const auto* table = item.value()->as<torch::nn::Embedding>();
    if (table != nullptr && table->options.sparse()) {
      training.options.sparse.push_back(item.key() + ".weight");
    }
  }
  return script_like(net, std::make_shared<torch::jit::CompilationUnit>());
}

void add_module_features(std::vector<FeatureKind>& kinds) {
  kinds.push_back(feature<Recomputed>("recompute", Splits::Yes));
  kinds.push_back(feature<Scripted>("scripted", Splits::Yes));
  kinds.push_back(feature<BatchNormUpdate>("update_batch_norm", Splits::No));
}

}  // namespace lockstep::test::training
