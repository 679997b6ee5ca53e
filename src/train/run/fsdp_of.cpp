// parallel.fsdp as options of an Fsdp.
#include <fmt/format.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <memory>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/models/resnet.h"
#include "lockstep/models/transformer.h"
#include "train/run/options_of.h"

namespace lockstep::train {
namespace {

using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

[[noreturn]] void refuse(const RunConfig& config, const std::string& key, const std::string& what) {
  const auto origin = config.origins.find("parallel.fsdp." + key);
  throw ConfigError(fmt::format("[run] {}parallel.fsdp.{}: {}",
                                origin == config.origins.end() ? "" : origin->second + ": ", key,
                                what));
}

int64_t numel_of(const torch::nn::Module& module) {
  int64_t numel = 0;
  for (const auto& parameter : module.parameters()) numel += parameter.numel();
  return numel;
}

Modules of_classes(const RunConfig& config, const torch::nn::Module& model,
                   std::vector<std::string> names) {
  // What transformers calls the layer of the same model.
  if (model.as<models::TransformerImpl>() != nullptr) {
    std::replace(names.begin(), names.end(), std::string("Qwen3DecoderLayer"),
                 std::string("TransformerBlock"));
  }
  try {
    return parallel::units_of(model, names);
  } catch (const ConfigError& error) {
    refuse(config, "transformer_layer_cls_to_wrap", error.what());
  }
}

// Sets units, or the size by which they are found.
void choose_units(parallel::FsdpOptions& options, const RunConfig& config,
                  const torch::nn::Module& model) {
  const auto& given = config.parallel.fsdp;
  const bool chooses = given.auto_wrap_policy == "AUTO";
  const bool is_transformer = model.as<models::TransformerImpl>() != nullptr;
  if (given.auto_wrap_policy == "NO_WRAP") return;
  if (!given.transformer_layer_cls_to_wrap.empty()) {
    options.units = of_classes(config, model, given.transformer_layer_cls_to_wrap);
    return;
  }
  const bool by_size = given.min_num_params > 0;
  if (is_transformer) {
    // Its loss reads the head's weight outside of the head's forward, and blocks are of one size.
    options.units = of_classes(config, model, {"TransformerBlock"});
    if (by_size && numel_of(*options.units.at(0)) < given.min_num_params) options.units.clear();
  } else if (by_size) {
    options.min_num_params = given.min_num_params;
  } else if (chooses && model.as<models::ResNet18Impl>() != nullptr) {
    options.units = of_classes(config, model, {"BasicBlock"});
  }
}

}  // namespace

std::optional<parallel::FsdpOptions> fsdp_of(const RunConfig& config,
                                             const torch::nn::Module& model,
                                             const comm::World& world) {
  if (config.parallel.strategy != "fsdp") return std::nullopt;
  const auto& given = config.parallel.fsdp;
  parallel::FsdpOptions options{.reshard_after_forward = given.reshard_after_forward,
                                .forward_prefetch = given.forward_prefetch,
                                .offload_folder = given.offload_folder};
  if (!given.offload_folder.empty()) {
    options.offload = parallel::Offload::File;
  } else if (given.cpu_offload) {
    options.offload = parallel::Offload::Cpu;
  }
  const std::string& strategy = given.sharding_strategy;
  if (strategy == "NO_SHARD") options.sharding = parallel::Sharding::None;
  if (strategy == "SHARD_GRAD_OP" || strategy == "HYBRID_SHARD_ZERO2") {
    options.sharding = parallel::Sharding::Gradients;
  }
  if (strategy.starts_with("HYBRID_SHARD") && world.local_size() < world.size()) {
    options.shard_ranks = world.local_size();
  }
  if (given.backward_prefetch == "BACKWARD_POST") {
    options.backward_prefetch = parallel::BackwardPrefetch::After;
  } else if (given.backward_prefetch == "NO_PREFETCH") {
    options.backward_prefetch = parallel::BackwardPrefetch::None;
  }
  if (config.parallel.buffers == "average") options.buffers = parallel::Buffers::Average;
  if (config.parallel.buffers == "none") options.buffers = parallel::Buffers::None;
  choose_units(options, config, model);
  return options;
}

std::optional<parallel::ActivationCheckpointing> recomputed_units(const RunConfig& config,
                                                                  const Trainer& trainer,
                                                                  const torch::nn::Module& model) {
  if (config.parallel.strategy != "fsdp" || !config.parallel.fsdp.activation_checkpointing) {
    return std::nullopt;
  }
  std::set<std::string> names;
  for (const auto& unit : trainer.fsdp()->units()) names.insert(unit.name);
  Modules modules;
  for (const auto& item : model.named_modules({}, /*include_self=*/false)) {
    if (names.contains(item.key())) modules.push_back(item.value());
  }
  if (modules.empty()) {
    refuse(config, "activation_checkpointing",
           fmt::format("model.kind {} is one unit: give min_num_params, or leave it out",
                       config.model.kind));
  }
  return parallel::ActivationCheckpointing(std::move(modules));
}

}  // namespace lockstep::train
