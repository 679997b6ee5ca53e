// What a training is made of, made from its options.
#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>

#include "comm/together.h"
#include "core/divided_up.h"
#include "core/files/lasting_path.h"
#include "core/hash/mix.h"
#include "lockstep/core/error.h"
#include "lockstep/parallel/sync_batch_norm.h"
#include "train/options.h"
#include "train/training.h"

namespace lockstep::train {
namespace {

std::vector<at::Tensor> once(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> all;
  std::set<const at::TensorImpl*> known;
  for (const auto& tensor : tensors) {
    if (known.insert(tensor.unsafeGetTensorImpl()).second) all.push_back(tensor);
  }
  return all;
}

double factor_of(parallel::LrScaling scaling, int64_t batches) {
  const auto count = static_cast<double>(batches);
  switch (scaling) {
    case parallel::LrScaling::None:
      return 1;
    case parallel::LrScaling::Linear:
      return count;
    case parallel::LrScaling::Sqrt:
      return std::sqrt(count);
  }
  return 1;
}

// Groups of the module's parameters become groups of this rank's shards of them.
void replace_by_shards(std::vector<torch::optim::OptimizerParamGroup>& groups,
                       const TrainedPart& part) {
  std::map<std::string, at::Tensor> shards;
  for (const auto& each : part.fsdp->shards()) shards[each.name] = each.shard;
  std::map<const at::TensorImpl*, at::Tensor> by_parameter;
  for (const auto& named : part.model.module().named_parameters()) {
    const auto shard = shards.find(named.key());
    if (shard != shards.end()) by_parameter[named.value().unsafeGetTensorImpl()] = shard->second;
  }
  for (auto& group : groups) {
    for (auto& parameter : group.params()) {
      const auto shard = by_parameter.find(parameter.unsafeGetTensorImpl());
      if (shard == by_parameter.end()) {
        throw ConfigError(
            "[train] TrainerOptions::groups gives a tensor that is not a parameter of the model: "
            "with "
            "fsdp groups are of parameters, in whose place their shards are optimized");
      }
      parameter = shard->second;
    }
  }
}

}  // namespace

Training::Training(const comm::World& world, std::vector<Part> parts, StepFunction step,
                   DataSource data, TrainerOptions options)
    : world_(world), options_(std::move(options)), step_function_(std::move(step)) {
  state_.rank = world.rank();
  state_.ranks = world.size();
  world.group().refuse_python_ranks("Trainer");
  comm::together(world.group(), "train",
                 [&] { check_options(options_, parts, data, world.group()); });
  compare_options(options_, parts, data, world.group());
  for (auto* path : {&options_.saving.directory, &options_.saving.resume_from}) {
    *path = lasting_path(*path);
  }
  if (!options_.loader.device) options_.loader.device = world.device();
  options_.ddp.lanes = options_.loader.lanes;
  if (options_.fsdp) options_.fsdp->lanes = options_.loader.lanes;
  make_stages(std::move(data));
  make_parts(std::move(parts));
  compare_optimizers();
  track_all();
}

void Training::make_stages(DataSource data) {
  if (options_.stages.empty()) {
    options_.stages.push_back({.data = std::move(data), .epochs = options_.epochs});
  }
  for (const auto& stage : options_.stages) {
    data::LoaderOptions loading = options_.loader;
    if (stage.batch_size > 0) loading.batch_size = stage.batch_size;
    // Each stage counts its epochs from 0: with one seed for all, later ones would draw the first
    // one's numbers again (order, dropout of lanes).
    if (!stages_.empty()) {
      loading.seed =
          static_cast<int64_t>(mix(mix(static_cast<uint64_t>(loading.seed)) ^ stages_.size()) >> 1);
    }
    StageRun run{.stage = stage};
    run.loader = std::make_unique<data::Loader>(stage.data.dataset(), world_, loading);
    run.steps_of_epoch = divided_up(run.loader->batches(), options_.accumulation);
    run.steps = stage.steps > 0 ? std::min(stage.steps, kMostSteps) : run.steps_of(stage.epochs);
    state_.steps += run.steps;
    stages_.push_back(std::move(run));
  }
  if (options_.max_steps > 0) {
    state_.steps =
        state_.steps > 0 ? std::min(state_.steps, options_.max_steps) : options_.max_steps;
  }
}

void Training::make_parts(std::vector<Part> parts) {
  parts_.reserve(parts.size());
  for (auto& given : parts) {
    TrainedPart& part = parts_.emplace_back();
    part.name = given.name;
    part.model = given.model;
    auto& module = part.model.module();
    module.to(world_.device());
    if (const auto ranks = options_.sync_batch_norm) {
      parallel::convert_sync_batch_norm(
          module, *ranks == 0 ? world_.group()
                              : world_.group().split(world_.rank() / static_cast<int>(*ranks)));
    }
    attach(part);
    if (options_.loader.lanes > 0) {
      part.ddp ? part.lane_mean.emplace(*part.ddp) : part.lane_mean.emplace(*part.fsdp);
    }
    if (options_.precision == Precision::Float16) {
      part.scaler.emplace(world_.group(), options_.scaler);
    }
    if (options_.weight_average) {
      auto weights = part.parameters;
      for (const auto& buffer : module.buffers()) weights.push_back(buffer);
      part.average = std::make_unique<parallel::WeightAverage>(weights, *options_.weight_average);
    }
    make_optimizer(part, given.optimizer ? given.optimizer : options_.optimizer);
    make_schedule(part, given.learning_rate ? *given.learning_rate : options_.learning_rate);
  }
}

// Makes the part's Ddp, or its Fsdp of the units that are the part's.
void Training::attach(TrainedPart& part) {
  auto& module = part.model.module();
  if (!options_.fsdp) {
    part.parameters = once(module.parameters());
    part.ddp = std::make_unique<parallel::Ddp>(part.model.shared(), world_.group(), options_.ddp);
    return;
  }
  parallel::FsdpOptions own = *options_.fsdp;
  std::set<const torch::nn::Module*> modules;
  for (const auto& each : module.modules()) modules.insert(each.get());
  std::erase_if(own.units, [&](const auto& unit) { return !modules.contains(unit.get()); });
  part.fsdp = std::make_unique<parallel::Fsdp>(part.model.shared(), world_.group(), std::move(own));
  part.parameters = part.fsdp->parameters();
}

void Training::make_optimizer(TrainedPart& part, const MakeOptimizer& make) {
  std::vector<torch::optim::OptimizerParamGroup> groups{
      torch::optim::OptimizerParamGroup(part.parameters)};
  comm::together(world_.group(), "train", [&] {
    if (options_.groups) {
      groups = options_.groups(part.model.module());
      if (groups.empty()) throw ConfigError("[train] TrainerOptions::groups gives no group");
      // A module gives a tied parameter once for each of its names.
      for (auto& group : groups) group.params() = once(group.params());
      if (part.fsdp) replace_by_shards(groups, part);
    }
    if (options_.zero) return;
    part.optimizer = make(std::move(groups));
    if (!part.optimizer || part.optimizer->param_groups().empty()) {
      throw ConfigError(
          fmt::format("[train] the function that makes the optimizer of part '{}' returned {}",
                      part.name, part.optimizer ? "one without a parameter group" : "none"));
    }
  });
  if (options_.zero) {
    auto zero = std::make_unique<parallel::ZeroOptimizer>(std::move(groups), world_.group(), make);
    part.zero = zero.get();
    part.optimizer = std::move(zero);
  }
  if (dynamic_cast<torch::optim::LBFGS*>(part.optimizer.get()) != nullptr) {
    throw ConfigError(
        "[train] LBFGS evaluates the loss several times a step, and a Trainer's step does it once: "
        "write the loop (global_loss() in lockstep/parallel/metrics.h shows how)");
  }
  const double factor =
      factor_of(options_.lr_scaling, std::max<int64_t>(options_.loader.lanes, world_.size()));
  for (auto& group : part.optimizer->param_groups()) {
    group.options().set_lr(group.options().get_lr() * factor);
    part.base_rates.push_back(group.options().get_lr());
  }
  if (part.ddp && options_.ddp.check_same_every > 0) part.ddp->include_in_check(*part.optimizer);
}

void Training::make_schedule(TrainedPart& part, const LearningRate& rate) {
  if (rate.needs_steps && state_.steps == 0) {
    throw ConfigError(
        "[train] the learning rate depends on how many steps the run has, which max_time alone "
        "does not say: give epochs or max_steps, too, or a rate that does not, as constant() or "
        "follow(step_lr(...))");
  }
  if (rate.plateau) {
    if (!options_.evaluation.data) {
      throw ConfigError(
          "[train] a learning rate that follows a metric needs an evaluation: give "
          "TrainerOptions::evaluation");
    }
    part.plateau_options = rate.plateau;
    part.plateau.emplace(*part.optimizer, world_.group(), *rate.plateau);
    part.plateau_metric = rate.metric;
  } else if (rate.schedule) {
    comm::together(world_.group(), "train", [&] {
      part.rate_of_step = rate.schedule(std::max<int64_t>(state_.steps, 1));
      part.schedule.emplace(*part.optimizer, part.rate_of_step);
    });
    part.note_rates();
  }
  state_.learning_rate = part.optimizer->param_groups()[0].options().get_lr();
}

}  // namespace lockstep::train
