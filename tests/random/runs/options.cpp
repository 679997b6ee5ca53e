#include "random/runs/options.h"

#include "lockstep/checkpoint/directory.h"
#include "train/net.h"

namespace lockstep::test::runs {
namespace {

train::LearningRate schedule_of(const Settings& run) {
  train::Warmup warmup;
  if (run.is("warmup", "steps")) warmup.steps = 3;
  if (run.is("warmup", "ratio")) warmup.ratio = 0.25;
  const auto& kind = run["schedule"];
  if (kind == "cosine") return train::cosine_decay(warmup, 1e-5);
  if (kind == "linear") return train::linear_decay(warmup);
  if (kind == "step") return train::follow(step_lr({.size = 4, .gamma = 0.7}), warmup);
  if (kind == "plateau") return train::on_plateau({.factor = 0.5, .patience = 0});
  if (kind != "one_cycle") return train::constant(warmup);
  return train::follow([](int64_t steps) { return one_cycle_lr({.steps = steps}); }, warmup);
}

std::vector<torch::optim::OptimizerParamGroup> groups_of(torch::nn::Module& model) {
  std::vector<at::Tensor> matrices, vectors;
  for (const auto& each : model.parameters()) (each.dim() > 1 ? matrices : vectors).push_back(each);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices);
  groups.emplace_back(vectors, std::make_unique<torch::optim::AdamWOptions>(5e-3));
  return groups;
}

std::shared_ptr<CommHook> hook_of(const Settings& run) {
  const auto& kind = run["hook"];
  if (kind == "top_k") return std::make_shared<TopK>(TopKOptions{.fraction = 0.1});
  if (kind == "cast") return std::make_shared<CastHook>(at::kHalf);
  if (kind != "power_sgd") return nullptr;
  return std::make_shared<PowerSgd>(
      PowerSgdOptions{.start_iteration = 3, .least_compression = 1.01});
}

std::optional<FsdpOptions> fsdp_of(const Settings& run, const std::string& folder) {
  const auto& kind = run["division"];
  if (kind == "ddp" || kind == "zero") return std::nullopt;
  FsdpOptions options{.min_num_params = run.number("units"), .share_memory = kind == "share"};
  options.forward_prefetch = run.has("ahead");
  options.reshard_after_forward = !run.has("whole");
  if (run.has("reduce")) options.reduce_dtype = at::kDouble;
  if (run.is("buffers", "average")) options.buffers = parallel::Buffers::Average;
  const auto ranks = static_cast<int>(run.number("ranks"));
  if (run.has("replicas") && ranks % 2 == 0) options.shard_ranks = ranks / 2;
  if (kind == "gradients") options.sharding = parallel::Sharding::Gradients;
  if (kind == "file") {
    options.offload = parallel::Offload::File;
    options.offload_folder = folder;
  }
  return options;
}

// The default, where an Fsdp is in its place.
DdpOptions ddp_of(const Settings& run) {
  DdpOptions options{.hook = hook_of(run)};
  if (!run.is("division", "ddp") && !run.is("division", "zero")) return options;
  if (run.has("buckets")) options.bucket_bytes = {run.number("buckets")};
  if (run.has("check")) options.check_same_every = run.number("check");
  if (run.has("reduce")) options.reduce_dtype = at::kDouble;
  if (run.is("buffers", "average")) options.buffers = parallel::Buffers::Average;
  return options;
}

train::MakeOptimizer optimizer_of(const std::string& name) {
  using namespace torch::optim;
  if (name == "adamw") return train::adamw({.lr = 0.01, .weight_decay = 0.01});
  if (name == "adam") return train::adam({.lr = 0.01});
  if (name == "adagrad") return train::optimizer<Adagrad>(AdagradOptions(0.02));
  if (name == "rmsprop") return train::optimizer<RMSprop>(RMSpropOptions(0.003).momentum(0.5));
  return train::sgd({.lr = 0.02, .momentum = 0.9, .nesterov = true});
}

std::optional<WeightAverageOptions> average_of(const std::string& name) {
  if (name == "no") return std::nullopt;
  WeightAverageOptions options{.decay = 0.75, .start = 2};
  if (name == "swa") options.decay.reset();
  if (name == "every") options.every = 3;
  if (name == "growing") {
    options.decay_of = [](int64_t before) { return 1 - 1 / (1 + static_cast<double>(before)); };
  }
  return options;
}

train::Better better_of(const std::string& metric) {
  return metric == "loss" ? train::Better::Lower : train::Better::Higher;
}

}  // namespace

TrainerOptions options_of(const Settings& run, const std::string& folder) {
  TrainerOptions options;
  options.optimizer = optimizer_of(run["optimizer"]);
  options.learning_rate = schedule_of(run);
  if (run.has("scaling")) options.lr_scaling = LrScaling::Sqrt;
  if (run.has("groups")) options.groups = groups_of;
  const auto& length = run["length"];
  if (length == "epochs" || length == "both") options.epochs = 3;
  if (length == "steps") options.max_steps = 13;
  if (length == "both" || length == "stages_and_steps") options.max_steps = 11;
  if (length.starts_with("stages")) {
    options.stages = {{.name = "a", .data = train_samples(70, 7), .epochs = 1, .batch_size = 5},
                      {.name = "b", .data = train_samples(run.number("samples")), .steps = 5},
                      {.name = "c", .data = train_samples(70, 8), .epochs = 2}};
  }
  options.loader = {.batch_size = run.number("batch"),
                    .seed = 3,
                    .shuffle = run.has("shuffle"),
                    .drop_last = run.has("drop_last"),
                    .prefetch = run.number("prefetch"),
                    .workers = run.number("workers"),
                    .lanes = has_lanes(run) ? run.number("lanes") : 0};
  if (run.has("noise")) {
    options.loader.transforms = {[](data::Batch batch) {
      batch.data = batch.data + 0.1 * at::randn_like(batch.data);
      return batch;
    }};
    options.evaluation.transforms.emplace();
  }
  options.accumulation = run.number("accumulation");
  if (run.has("count")) {
    options.count = [](const data::Batch& batch) {
      return (batch.target != 0).sum().item<int64_t>() + 1;
    };
  }
  if (run.has("clip")) options.max_grad_norm = 0.5;
  if (run.is("precision", "bf16")) options.precision = train::Precision::BFloat16;
  if (run.is("precision", "fp16")) options.precision = train::Precision::Float16;
  options.scaler = {.init_scale = 1048576, .growth_interval = 3};
  if (run.has("bad")) options.non_finite = train::NonFinite::Skip;
  if (run.has("sync_bn")) options.sync_batch_norm = run.is("sync_bn", "pairs") ? 2 : 0;
  options.zero = run.is("division", "zero");
  options.fsdp = fsdp_of(run, folder);
  options.ddp = ddp_of(run);
  options.evaluation.data = train_samples(run.number("held_out"), 6);
  options.evaluation.every_epochs = run.number("evaluate_epochs");
  options.evaluation.every_steps = run.number("evaluate_steps");
  options.evaluation.batch_size = run.number("evaluate_batch");
  options.weight_average = average_of(run["average"]);
  if (run.has("early")) {
    options.early_stopping = {.metric = run["early"],
                              .better = better_of(run["early"]),
                              .patience = run.number("patience"),
                              .min_delta = 0.01};
  }
  options.saving = {.directory = folder + "/checkpoints",
                    .every_steps = run.number("save_steps"),
                    .every_epochs = run.number("save_epochs"),
                    .at_end = run.has("at_end"),
                    .keep_last = run.number("keep"),
                    .async = run.has("async")};
  if (run.has("tracked")) options.saving.each_rank = {"queue"};
  if (run.is("from", "folder")) {
    const auto newest = checkpoint::newest_checkpoint(options.saving.directory);
    options.saving.resume_from = newest.value_or("");
  }
  if (run.has("best")) {
    options.saving.best = {.metric = run["best"],
                           .better = better_of(run["best"]),
                           .restore_at_end = run.has("restore_best")};
  }
  return options;
}

}  // namespace lockstep::test::runs
