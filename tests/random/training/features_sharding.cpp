// Fsdp in the place of Ddp: a rank's parts of parameters and gradients, put together again where a
// program is compared.
#include <torch/torch.h>

#include <filesystem>
#include <set>

#include "random/training/features.h"

namespace lockstep::test::training {
namespace {

using namespace parallel;

// What a module computes in whose shards are double.
struct NarrowParameters : Feature {
  explicit NarrowParameters(const Part&) {}
  static bool applies(const Program& program) {
    const std::vector<std::string> own{"assigning", "checkpoint", "complex",        "counter",
                                       "gathered",  "script",     "sync_batch_norm"};
    return program.has("fsdp") && std::ranges::none_of(own, [&](const std::string& layer) {
             return program.has_layer(layer);  // computes with numbers of a dtype of its own
           });
  }
};

// How it shards changes no bit, so variants of a program do it differently.
struct Sharded : Feature {
  explicit Sharded(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  void plan(Training& training) override {
    if (training.alone) return;
    training.sharding = [this, &training](const Net& net) { return options_for(training, net); };
  }
  FsdpOptions options_for(const Training& training, const Net& net) const {
    Random random(seed + static_cast<uint64_t>(training.program.variant));
    FsdpOptions options;
    std::set<const void*> seen;  // two tied blocks are one
    for (const auto& block : net.blocks()) {
      const bool is_unit = random.chance(0.6);
      if (seen.insert(block.get()).second && is_unit) options.units.push_back(block);
    }
    options.min_num_params = random.pick({0, 0, 1, 20});
    options.sharding = random.pick({Sharding::Full, Sharding::Full, Sharding::Gradients});
    const int ranks = training.group.size();
    options.shard_ranks = ranks % 2 == 0 ? random.pick({0, 0, 1, 2}) : 0;
    options.reshard_after_forward = random.chance(0.5) && options.sharding == Sharding::Full;
    if (options.reshard_after_forward && ranks == 4 && options.shard_ranks == 0) {
      options.reshard_ranks = random.pick({0, 2});
    }
    options.backward_prefetch =
        random.pick({BackwardPrefetch::Before, BackwardPrefetch::After, BackwardPrefetch::None});
    options.forward_prefetch = random.chance(0.5);
    options.max_unsharded_units = random.between(1, 3);
    options.share_memory = random.chance(0.6);
    options.offload = random.pick({Offload::None, Offload::None, Offload::Cpu, Offload::File});
    if (options.offload == Offload::File) {
      options.offload_folder = std::filesystem::temp_directory_path();
    }
    options.reduce_dtype = training.options.reduce_dtype;
    options.buffers = training.options.buffers;
    options.ignore = training.options.ignore;
    options.lanes = training.options.lanes;
    options.param_dtype = options.buffer_dtype = param_dtype_of(training.program);
    return options;
  }
  uint64_t seed;
};

// Before some steps parameters are read, and may stay whole in the step.
struct Unsharded : Feature {
  explicit Unsharded(const Part& part) : seed(part.seed) {}
  static bool applies(const Program& program) { return program.has("fsdp"); }
  void begin_step(Training& training) override {
    Random random(seed + static_cast<uint64_t>(training.step));
    if (random.chance(0.4)) return;
    const bool stays = random.chance(0.5);
    for (auto& lane : training.lanes) {
      for (auto& model : lane.models) {
        if (model.fsdp) model.fsdp->unshard();
        double sum = 0;
        for (const auto& parameter : model.net->parameters()) {
          sum += parameter.detach().abs().sum().to(at::kDouble).item<double>();
        }
        lane.losses.push_back(sum);
        if (model.fsdp && !stays) model.fsdp->reshard();
      }
    }
  }
  uint64_t seed;
};

// Every rank's parts of a gradient as one tensor that lies as `parameter` does; undefined when no
// rank has a part.
at::Tensor whole_gradient(const FsdpShard& own, const at::Tensor& parameter, const Group& group) {
  const at::Tensor& gradient = own.shard.grad();
  const bool has_part = own.shard.numel() > 0;
  auto known = at::zeros({1}, at::kDouble), covered = at::zeros({parameter.numel()}, at::kDouble);
  auto values =
      at::zeros({parameter.numel()}, parameter.is_complex() ? at::kComplexDouble : at::kDouble);
  if (gradient.defined() && (has_part || parameter.numel() == 0)) known.fill_(1);
  if (has_part) {
    covered.narrow(0, own.begin, own.shard.numel()).fill_(1);
    if (gradient.defined()) values.narrow(0, own.begin, own.shard.numel()).copy_(gradient);
  }
  // Groups that replicate each other have the same part more than once.
  for (auto& tensor : {known, covered, values}) group.all_reduce(tensor, ReduceOp::Sum).wait();
  if (known.item<double>() == 0) return {};
  auto whole = at::empty_strided(parameter.sizes(), parameter.strides(), parameter.options());
  whole.as_strided({parameter.numel()}, {1}).copy_(values / covered);
  return whole;
}

}  // namespace

std::optional<at::ScalarType> param_dtype_of(const Program& program) {
  const Part* const part = program.feature("param_dtype");
  if (part == nullptr) return std::nullopt;
  return Random(part->seed).pick({at::kFloat, at::kBFloat16});
}

std::vector<at::Tensor> Model::parameters() const {
  if (!fsdp) return net->parameters();
  auto all = fsdp->parameters();
  std::set<const void*> sharded;
  const auto named = net->named_parameters();
  for (const auto& shard : fsdp->shards()) {
    sharded.insert(named[shard.name].unsafeGetTensorImpl());
  }
  // Those that it leaves alone.
  for (const auto& parameter : net->parameters()) {
    if (sharded.insert(parameter.unsafeGetTensorImpl()).second) all.push_back(parameter);
  }
  return all;
}

parallel::Hold Model::hold() { return fsdp ? fsdp->hold() : ddp->hold(); }

State state_of(const Lane& lane, const Group& group) {
  const at::NoGradGuard no_grad;
  State state;
  for (size_t i = 0; i < lane.models.size(); ++i) {
    const std::string prefix = "model " + std::to_string(i) + " ";
    const Model& model = lane.models[i];
    const auto named = model.net->named_parameters();
    std::unordered_map<const void*, at::Tensor> gradients;
    if (model.fsdp) {
      model.fsdp->unshard();
      for (const auto& shard : model.fsdp->shards()) {
        const auto& parameter = named[shard.name];
        gradients[parameter.unsafeGetTensorImpl()] = whole_gradient(shard, parameter, group);
      }
    }
    for (const auto& item : named) {
      const auto& value = item.value();
      state.emplace_back(prefix + item.key(), value.detach().clone());
      const auto found = gradients.find(value.unsafeGetTensorImpl());
      const at::Tensor gradient = found != gradients.end() ? found->second : value.grad();
      state.emplace_back(prefix + item.key() + " gradient", !gradient.defined() ? at::Tensor()
                                                            : gradient.is_sparse()
                                                                ? gradient.detach().to_dense()
                                                                : gradient.detach());
    }
    for (const auto& item : model.net->named_buffers()) {
      state.emplace_back(prefix + item.key() + " buffer", item.value());
    }
    if (model.fsdp) model.fsdp->reshard();
  }
  state.emplace_back("losses", torch::tensor(lane.losses, at::kDouble));
  return state;
}

void add_sharding_features(std::vector<FeatureKind>& kinds) {
  kinds.push_back(feature<Sharded>("fsdp", Splits::Yes));
  kinds.push_back(feature<NarrowParameters>("param_dtype", Splits::No));
  kinds.push_back(feature<Unsharded>("unshard", Splits::Yes));
}

}  // namespace lockstep::test::training
