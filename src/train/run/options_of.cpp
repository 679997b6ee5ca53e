#include "train/run/options_of.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <memory>
#include <numeric>

#include "lockstep/core/error.h"
#include "lockstep/parallel/autocast.h"
#include "lockstep/parallel/hooks.h"
#include "lockstep/train/file_data.h"
#include "train/slice.h"

namespace lockstep::train {
namespace {

using parallel::LrScaling;

// The configuration is checked; what is none of these cannot come here.
template <class T>
T choice(const std::string& text, const std::map<std::string, T>& values, const char* key) {
  const auto found = values.find(text);
  if (found != values.end()) return found->second;
  throw ConfigError(fmt::format("[run] {}: '{}' is not supported by the trainer", key, text));
}

Better better_of(const std::string& mode, const std::string& metric) {
  const bool is_lower = mode == "auto" ? is_better_lower(metric) : mode == "min";
  return is_lower ? Better::Lower : Better::Higher;
}

LearningRate learning_rate_of(const RunConfig& config) {
  const auto& given = config.schedule;
  const Warmup warmup{.steps = given.warmup_steps, .ratio = given.warmup_ratio};
  if (given.kind == "constant") return constant(warmup);
  if (given.kind == "linear") return linear_decay(warmup, given.min_lr);
  if (given.kind == "cosine") return cosine_decay(warmup, given.min_lr);
  if (given.kind == "polynomial") {
    return follow(
        [given](int64_t steps) {
          return parallel::Schedule{.lr = [=](double base, int64_t step) {
            const double left =
                std::max(0.0, 1.0 - static_cast<double>(step) / static_cast<double>(steps));
            return given.min_lr + (base - given.min_lr) * std::pow(left, given.power);
          }};
        },
        warmup);
  }
  if (given.kind == "step") {
    return follow(
        parallel::step_lr({.size = std::max<int64_t>(given.step_size, 1), .gamma = given.gamma}),
        warmup);
  }
  if (given.kind == "multi_step") {
    return follow(parallel::multi_step_lr(given.milestones, given.gamma), warmup);
  }
  if (given.kind == "exponential") return follow(parallel::exponential_lr(given.gamma), warmup);
  if (given.kind == "one_cycle") {
    return follow(
        [given](int64_t steps) {
          const auto cycle = parallel::one_cycle_lr(
              {.steps = steps, .rising = given.rising, .cycle_momentum = given.cycle_momentum});
          // It has no rate for a step after the last.
          parallel::Schedule schedule{.lr = [=](double base, int64_t step) {
            return cycle.lr(base, std::min(step, steps - 1));
          }};
          if (cycle.momentum) {
            schedule.momentum = [=](int64_t step) {
              return cycle.momentum(std::min(step, steps - 1));
            };
          }
          return schedule;
        },
        warmup);
  }
  if (given.kind == "plateau") {
    const std::string metric = "loss";
    return on_plateau(
        {.factor = given.gamma, .patience = given.patience, .lowest_lr = given.min_lr}, metric);
  }
  throw ConfigError(
      fmt::format("[run] schedule.kind: '{}' is not supported by the trainer", given.kind));
}

using ParameterGroup = torch::optim::OptimizerParamGroup;

// Groups keep the options that they were made with. An option that equals the default of its class
// counts in libtorch as one that was not given, and a group without decay would get the
// optimizer's.
MakeOptimizer keeping_options(MakeOptimizer make) {
  return [make = std::move(make)](std::vector<ParameterGroup> groups) {
    std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> given;
    for (const auto& group : groups) {
      given.push_back(group.has_options() ? group.options().clone() : nullptr);
    }
    auto optimizer = make(std::move(groups));
    if (optimizer == nullptr) return optimizer;
    auto& made = optimizer->param_groups();
    for (size_t i = 0; i < std::min(given.size(), made.size()); ++i) {
      if (given[i] != nullptr) made[i].set_options(std::move(given[i]));
    }
    return optimizer;
  };
}

MakeOptimizer optimizer_of(const RunConfig& config, const Registry& registry) {
  auto make = registry.optimizer(config);
  return config.optimizer.weight_decay_of == "all" ? make : keeping_options(std::move(make));
}

// Two groups, where some parameters do not decay.
decltype(TrainerOptions::groups) groups_of(const RunConfig& config, const Registry& registry) {
  if (config.optimizer.weight_decay_of == "all") return nullptr;
  RunConfig without = config;
  without.optimizer.weight_decay = 0;
  return [make = registry.optimizer(without)](torch::nn::Module& module) {
    std::vector<at::Tensor> matrices, others;
    for (const auto& parameter : module.parameters()) {
      (parameter.dim() > 1 ? matrices : others).push_back(parameter);
    }
    std::vector<ParameterGroup> groups;
    if (!matrices.empty()) groups.emplace_back(std::move(matrices));
    if (!others.empty()) {
      // Options are of a class that belongs to the optimizer.
      const auto plain = make({ParameterGroup(others)});
      groups.emplace_back(std::move(others), plain->defaults().clone());
    }
    return groups;
  };
}

// What a file alone does not tell: the rate grows with the number of ranks, or lanes.
void refuse_lowest_rate(const RunConfig& config, const comm::World& world) {
  const auto& given = config.optimizer;
  const auto parts = static_cast<double>(std::max<int64_t>(config.parallel.lanes, world.size()));
  const double rate = given.learning_rate * (given.lr_scaling == "linear" ? parts
                                             : given.lr_scaling == "sqrt" ? std::sqrt(parts)
                                                                          : 1);
  if (config.schedule.min_lr <= rate) return;
  throw ConfigError(
      fmt::format("[run] schedule.min_lr: {} is above optimizer.learning_rate {}, which "
                  "lr_scaling {} makes {}",
                  config.schedule.min_lr, given.learning_rate, given.lr_scaling, rate));
}

Precision precision_of(const RunConfig& config, const comm::World& world) {
  const auto& dtype = config.mixed_precision.dtype;
  if (dtype == "auto") {
    return parallel::preferred_dtype(world.device()) == at::kBFloat16 ? Precision::BFloat16
                                                                      : Precision::Full;
  }
  return choice<Precision>(
      dtype, {{"no", Precision::Full}, {"bf16", Precision::BFloat16}, {"fp16", Precision::Float16}},
      "mixed_precision.dtype");
}

std::shared_ptr<parallel::CommHook> hook_of(const RunConfig& config) {
  const auto& given = config.parallel;
  if (given.hook == "none") return nullptr;
  if (given.hook == "fp16") return std::make_shared<parallel::CastHook>(at::kHalf);
  if (given.hook == "bf16") return std::make_shared<parallel::CastHook>(at::kBFloat16);
  if (given.hook == "power_sgd") {
    return std::make_shared<parallel::PowerSgd>(parallel::PowerSgdOptions{
        .rank = given.hook_rank, .start_iteration = given.hook_start_step});
  }
  if (given.hook == "top_k") {
    return std::make_shared<parallel::TopK>(parallel::TopKOptions{.fraction = given.hook_fraction});
  }
  throw ConfigError(
      fmt::format("[run] parallel.hook: '{}' is not supported by the trainer", given.hook));
}

parallel::DdpOptions ddp_of(const RunConfig& config) {
  const auto& given = config.parallel;
  if (given.strategy == "fsdp") return {};
  const auto bytes = static_cast<int64_t>(given.bucket_cap_mb * 1024 * 1024);
  return {.bucket_bytes = {std::min<int64_t>(int64_t{1} << 20, bytes), bytes},
          .unused = choice<parallel::Unused>(
              given.unused, {{"zero", parallel::Unused::Zero}, {"error", parallel::Unused::Error}},
              "parallel.unused"),
          .buffers = choice<parallel::Buffers>(given.buffers,
                                               {{"broadcast", parallel::Buffers::Broadcast},
                                                {"average", parallel::Buffers::Average}},
                                               "parallel.buffers"),
          .hook = hook_of(config)};
}

// 0: none. Any other time is a limit, also one below a millisecond, or of ages.
std::chrono::milliseconds limit_of(double seconds) {
  constexpr double kAges = 1e12;  // ms; of it nanoseconds still fit into 64 bits
  if (seconds == 0) return {};
  return std::chrono::milliseconds(
      std::max<int64_t>(1, std::llround(std::min(seconds * 1000, kAges))));
}

Saving saving_of(const RunConfig& config) {
  const auto& given = config.checkpoint;
  Saving saving{.directory = checkpoint_directory(config),
                .keep_last = given.save_total_limit,
                .async = given.async,
                .resume = given.resume == "latest" ? Resume::Latest : Resume::Never,
                .resume_from = given.resume == "latest" ? "" : given.resume,
                .on_preemption = given.save_on_preemption};
  if (saving.directory.empty()) return saving;
  if (given.save_strategy == "steps") saving.every_steps = given.save_steps;
  if (given.save_strategy == "epoch") saving.every_epochs = 1;
  saving.at_end = given.save_strategy != "no";
  if (!given.best_metric.empty()) {
    saving.best = Best{.metric = given.best_metric,
                       .better = better_of(given.best_mode, given.best_metric),
                       .restore_at_end = given.restore_best};
  }
  return saving;
}

void refuse_without_evaluation(const char* key, bool is_given) {
  if (!is_given) return;
  throw ConfigError(
      fmt::format("[run] {}: there is no data to evaluate with; give data.validation_path or "
                  "data.validation_fraction",
                  key));
}

bool has_fractions(const RunData& data) {
  std::vector<int64_t> first(static_cast<size_t>(std::min<int64_t>(data.training->size(), 64)));
  std::iota(first.begin(), first.end(), 0);
  const at::Tensor targets = data.training->get_batch(first).target;
  return targets.defined() && targets.is_floating_point() && !at::equal(targets, targets.round());
}

// What an evaluation would only find out when an epoch has been trained.
void refuse_metrics(const RunConfig& config, const RunData& data) {
  const auto refuse = [&](const std::string& what) {
    const auto found = config.origins.find("training.metrics");
    throw ConfigError(fmt::format(
        "[run] {}: training.metrics: {}; the data have {}",
        found == config.origins.end() ? "in the program" : found->second, what,
        data.classes > 0 ? fmt::format("{} classes", data.classes) : "values as targets"));
  };
  const auto is = [](const std::string& text, std::initializer_list<const char*> names) {
    return std::ranges::find(names, text) != names.end();
  };
  const bool by_classes = is(config.training.loss, {"auto", "cross_entropy", "nll"});
  for (const auto& metric : config.training.metrics) {
    if (data.classes == 0) {
      if (is(metric, {"accuracy", "top_k", "confusion_matrix", "perplexity"}) &&
          has_fractions(data)) {
        refuse(metric + " is of classes");
      }
      continue;
    }
    if (by_classes && is(metric, {"mse", "rmse", "mae", "r2"})) {
      refuse(fmt::format("{} is of values, and training.loss {} of classes", metric,
                         config.training.loss));
    }
    if (metric == "auc" && data.classes > 2) refuse("auc is of two classes");
    if (metric == "top_k" && config.training.top_k > data.classes) {
      refuse(fmt::format("top_k is of the best {}", config.training.top_k));
    }
  }
}

std::shared_ptr<const data::Dataset> first_of(std::shared_ptr<const data::Dataset> whole,
                                              int64_t count) {
  if (count >= whole->size()) return whole;
  return std::make_shared<Slice>(with_classes_in_turns(std::move(whole)),
                                 Range{0, std::max<int64_t>(count, 1)});
}

std::vector<Stage> stages_of(const RunConfig& config, const Registry& registry, const RunData& data,
                             const comm::World& world) {
  std::vector<Stage> stages;
  const auto& training = config.training;
  if (training.curriculum.empty()) return stages;
  for (const auto& given : training.curriculum) {
    auto samples = data.training;
    if (!given.path.empty()) {
      RunConfig other = config;
      other.data.path = given.path;
      other.data.targets_path = given.targets_path;
      samples = data.more ? data.more(other.data) : registry.data(other, world).training;
      if (config.data.max_samples > 0) samples = first_of(samples, config.data.max_samples);
    }
    const auto count =
        static_cast<int64_t>(std::llround(given.fraction * static_cast<double>(samples->size())));
    stages.push_back({.name = fmt::format("{}", stages.size() + 1),
                      .data = first_of(samples, count),
                      .epochs = given.epochs});
  }
  Stage all{.name = "all", .data = data.training};
  if (training.max_steps > 0) {
    all.steps = training.max_steps;
  } else {
    all.epochs = training.epochs;
  }
  stages.push_back(all);
  return stages;
}

}  // namespace

comm::WorldOptions world_options_of(const RunConfig& config) {
  using comm::Backend, comm::DeviceKind;
  const auto& given = config.parallel;
  return {.backend = choice<Backend>(given.backend,
                                     {{"auto", Backend::Auto},
                                      {"shm", Backend::Shm},
                                      {"tcp", Backend::Tcp},
                                      {"gloo", Backend::Gloo},
                                      {"host-then-net", Backend::HostThenNet},
                                      {"nccl", Backend::Nccl},
                                      {"cuda_ipc", Backend::CudaIpc}},
                                     "parallel.backend"),
          .device = choice<DeviceKind>(
              given.device,
              {{"auto", DeviceKind::Auto}, {"cpu", DeviceKind::Cpu}, {"cuda", DeviceKind::Cuda}},
              "parallel.device"),
          .timeout = std::chrono::milliseconds(std::llround(given.timeout_seconds * 1000)),
          .tls = given.tls};
}

RunData data_of(const RunConfig& config, const Registry& registry, const comm::World& world) {
  const auto& given = config.data;
  RunData data = registry.data(config, world);
  if (!given.validation_path.empty() && !data.validation) {
    RunConfig other = config;
    other.data.path = given.validation_path;
    other.data.targets_path = given.validation_targets_path;
    data.validation = registry.data(other, world).training;
  }
  if (given.validation_fraction > 0) {
    const int64_t all = data.training->size();
    const int64_t part = held_out(given, all);
    if (part < 1 || part >= all) {
      throw ConfigError(fmt::format(
          "[run] data.validation_fraction = {} of {} samples leaves {} to train on and {} to "
          "evaluate with",
          given.validation_fraction, all, all - part, part));
    }
    // What is in memory is looked at.
    if (data.classes > 0 && is_file_data(given.kind) && given.kind != "images" &&
        given.kind != "tokens") {
      refuse_ordered_classes(*data.training, part, given.validation_fraction);
    }
    const auto whole = with_classes_in_turns(data.training);
    data.validation = std::make_shared<Slice>(whole, Range{all - part, all});
    data.training = std::make_shared<Slice>(whole, Range{0, all - part});
  }
  if (given.max_samples > 0) data.training = first_of(data.training, given.max_samples);
  return data;
}

SampleShape shape_of(const RunData& data) {
  const std::vector<int64_t> first = {0};
  const auto batch = data.training->get_batch(first);
  SampleShape shape{.data = batch.data.sizes().slice(1).vec(), .classes = data.classes};
  if (batch.target.defined()) shape.target = batch.target.sizes().slice(1).vec();
  return shape;
}

std::string checkpoint_directory(const RunConfig& config) {
  if (!config.checkpoint.directory.empty()) return config.checkpoint.directory;
  if (config.logging.output_dir.empty()) return "";
  return config.logging.output_dir + "/checkpoints";
}

TrainerOptions options_of(const RunConfig& config, const Registry& registry, const RunData& data,
                          const comm::World& world) {
  const auto& training = config.training;
  TrainerOptions options{
      .optimizer = optimizer_of(config, registry),
      .learning_rate = learning_rate_of(config),
      .lr_scaling = choice<LrScaling>(
          config.optimizer.lr_scaling,
          {{"none", LrScaling::None}, {"linear", LrScaling::Linear}, {"sqrt", LrScaling::Sqrt}},
          "optimizer.lr_scaling"),
      .groups = groups_of(config, registry),
      // As in transformers, a number of steps takes precedence over one of epochs.
      .epochs = training.max_steps > 0 ? 0 : training.epochs,
      .max_steps = training.max_steps,
      .max_time = limit_of(training.max_seconds),
      .loader = {.batch_size = training.batch_size,
                 .seed = training.seed,
                 .shuffle = config.data.shuffle,
                 .drop_last = config.data.drop_last,
                 .prefetch = config.data.prefetch,
                 .workers = config.data.workers,
                 .lanes = config.parallel.lanes},
      .stages = stages_of(config, registry, data, world),
      .accumulation = training.gradient_accumulation_steps,
      .max_grad_norm = training.max_grad_norm,
      .precision = precision_of(config, world),
      .scaler = {.init_scale = config.mixed_precision.initial_scale,
                 .growth_interval = config.mixed_precision.growth_interval},
      .non_finite = training.non_finite == "skip" ? NonFinite::Skip : NonFinite::Error,
      .zero = config.parallel.zero,
      .ddp = ddp_of(config),
      .saving = saving_of(config)};
  if (!options.stages.empty()) options.epochs = 0;
  if (config.parallel.sync_bn) options.sync_batch_norm = config.parallel.sync_bn_group_size;
  if (training.eval_strategy != "no" && !data.validation) {
    refuse_without_evaluation("training.metrics", !training.metrics.empty());
    refuse_without_evaluation("training.eval_steps", training.eval_steps > 0);
    refuse_without_evaluation("training.sample.prompt", !training.sample.prompt.empty());
  }
  refuse_metrics(config, data);
  refuse_lowest_rate(config, world);
  if (training.eval_strategy != "no" && data.validation) {
    options.evaluation = {
        .data = data.validation,
        .every_epochs = training.eval_strategy == "epoch" ? 1 : 0,
        .every_steps = training.eval_strategy == "steps" ? training.eval_steps : 0,
        .batch_size = training.eval_batch_size,
        .metrics = registry.metrics(config, shape_of(data))};
  }
  if (const auto& average = config.weight_average; average.kind != "none") {
    options.weight_average = parallel::WeightAverageOptions{
        .decay = average.kind == "ema" ? std::optional(average.decay) : std::nullopt,
        .start = average.start_step,
        .every = average.every_steps};
  }
  if (const auto& early = training.early_stopping; !early.metric.empty()) {
    options.early_stopping = EarlyStopping{.metric = early.metric,
                                           .better = better_of(early.mode, early.metric),
                                           .patience = early.patience,
                                           .min_delta = early.min_delta};
  }
  return options;
}

}  // namespace lockstep::train
