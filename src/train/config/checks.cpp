#include "train/config/checks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/network/address.h"
#include "train/config/replaced.h"

namespace lockstep::train {

std::vector<std::string> evaluated_numbers(const TrainingConfig& config) {
  std::vector<std::string> names = {"loss"};
  const auto add = [&names](const std::string& name) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  for (const auto& metric : config.metrics) {
    if (metric == "top_k") {
      add(fmt::format("top_{}_accuracy", config.top_k));
    } else if (metric == "confusion_matrix") {
      for (const char* name : {"accuracy", "precision", "recall", "f1"}) add(name);
    } else if (metric == "mse" || metric == "rmse" || metric == "mae" || metric == "r2") {
      for (const char* name : {"mse", "rmse", "mae", "r2"}) add(name);
    } else if (metric == "perplexity") {
      for (const char* name : {"perplexity", "cross_entropy"}) add(name);
    } else if (metric == "accuracy" || metric == "auc") {
      add(metric);
    } else {
      return {};
    }
  }
  return names;
}

namespace {

class Checks {
 public:
  Checks(const Schema& schema, const RunConfig& config, const OriginOf& origin_of,
         const IsGiven& is_given, Problems& problems)
      : schema_(schema),
        config_(config),
        origin_of_(origin_of),
        is_given_(is_given),
        problems_(problems) {}

  void training();
  void evaluation();
  void parallel();
  void fsdp();
  void data();
  void language_model();
  void launch();

 private:
  void transformer_sizes();
  void refuse(const std::string& path, const std::string& what) {
    problems_.add(origin_of_(path), fmt::format("{}: {}", path, what));
  }
  // A value other than the default is of use only where something else holds.
  void needs(const std::string& path, bool holds, const std::string& what) {
    if (holds || !is_given_(path)) return;
    for (const Key* key : schema_.all(path)) {
      if (key->load(config_) != key->fallback) return refuse(path, "needs " + what);
    }
  }
  // A metric that another key refers to has to be computed.
  void needs_metric(const std::string& path, const std::string& metric) {
    if (metric.empty()) return;
    const auto known = evaluated_numbers(config_.training);
    if (!known.empty() && std::find(known.begin(), known.end(), metric) == known.end()) {
      refuse(path, fmt::format("'{}' is none of {}; training.metrics says what is computed", metric,
                               fmt::join(known, ", ")));
    }
    if (config_.training.eval_strategy == "no") {
      refuse(path, "needs evaluations: training.eval_strategy is no");
    }
  }

  const Schema& schema_;
  const RunConfig& config_;
  const OriginOf& origin_of_;
  const IsGiven& is_given_;
  Problems& problems_;
};

void Checks::training() {
  const auto& schedule = config_.schedule;
  if (schedule.warmup_steps > 0 && schedule.warmup_ratio > 0) {
    refuse("schedule.warmup_ratio", "schedule.warmup_steps is given, too: give one of them");
  }
  for (const char* name : {"warmup_steps", "warmup_ratio"}) {
    needs(std::string("schedule.") + name, schedule.kind != "plateau",
          "another schedule.kind than plateau, which has no warm-up");
  }
  for (size_t i = 1; i < schedule.milestones.size(); ++i) {
    if (schedule.milestones[i] > schedule.milestones[i - 1]) continue;
    refuse("schedule.milestones", "they have to increase");
    break;
  }
  // Scaled, it is known with the number of ranks.
  if (schedule.min_lr > config_.optimizer.learning_rate && config_.optimizer.lr_scaling == "none") {
    refuse("schedule.min_lr", fmt::format("{} is above optimizer.learning_rate {}", schedule.min_lr,
                                          config_.optimizer.learning_rate));
  }
  if (schedule.kind == "plateau" && schedule.gamma >= 1) {
    refuse("schedule.gamma", "1 does not reduce the rate, as plateau does: below 1");
  }
  if (schedule.kind == "one_cycle" && schedule.rising >= 1) {
    refuse("schedule.rising", "1 leaves one_cycle no step on the way down: below 1");
  }
  const bool is_sgd = config_.optimizer.kind == "sgd";
  if (is_sgd && config_.optimizer.nesterov && config_.optimizer.momentum <= 0) {
    refuse("optimizer.nesterov", "needs optimizer.momentum above 0");
  }
  needs("training.label_smoothing",
        config_.training.loss == "auto" || config_.training.loss == "cross_entropy",
        "training.loss: cross_entropy");
  const auto& metrics = config_.training.metrics;
  needs("training.top_k", std::find(metrics.begin(), metrics.end(), "top_k") != metrics.end(),
        "top_k in training.metrics");
}

void Checks::evaluation() {
  const auto& training = config_.training;
  if (training.eval_strategy == "steps" && training.eval_steps < 1) {
    refuse("training.eval_strategy", "steps needs training.eval_steps, 1 or more");
  }
  needs("training.eval_steps", training.eval_steps == 0 || training.eval_strategy == "steps",
        "training.eval_strategy: steps");
  for (const char* name : {"metrics", "eval_batch_size"}) {
    needs(std::string("training.") + name, training.eval_strategy != "no",
          "evaluations: training.eval_strategy is no");
  }
  needs_metric("training.early_stopping.metric", training.early_stopping.metric);
  for (const char* name : {"mode", "patience", "min_delta"}) {
    needs(std::string("training.early_stopping.") + name, !training.early_stopping.metric.empty(),
          "training.early_stopping.metric, such as loss");
  }
  needs_metric("checkpoint.best_metric", config_.checkpoint.best_metric);
  for (const char* name : {"best_mode", "restore_best"}) {
    needs(std::string("checkpoint.") + name, !config_.checkpoint.best_metric.empty(),
          "checkpoint.best_metric");
  }
  if (config_.schedule.kind == "plateau" && training.eval_strategy == "no") {
    refuse("schedule.kind", "plateau needs evaluations: training.eval_strategy is no");
  }
  const bool has_place =
      !config_.checkpoint.directory.empty() || !config_.logging.output_dir.empty();
  for (const char* name : {"save_strategy", "save_steps", "save_total_limit"}) {
    needs(std::string("checkpoint.") + name, has_place || config_.checkpoint.save_strategy == "no",
          "checkpoint.directory or logging.output_dir");
  }
  // With `no` they wait for a run that saves again.
  needs("checkpoint.save_steps", config_.checkpoint.save_strategy != "epoch",
        "checkpoint.save_strategy: steps");
  for (const char* name : {"resume", "best_metric"}) {
    const std::string path = std::string("checkpoint.") + name;
    const std::string& value =
        path == "checkpoint.resume" ? config_.checkpoint.resume : config_.checkpoint.best_metric;
    needs(path, has_place || value.empty(), "checkpoint.directory or logging.output_dir");
  }
}

void Checks::parallel() {
  const auto& parallel = config_.parallel;
  if (parallel.strategy == "fsdp") {
    fsdp();
  } else {
    // Also with its default: who writes FULL_SHARD wants the model sharded.
    for (const Key& key : schema_.keys()) {
      if (!key.path.starts_with("parallel.fsdp.") || !is_given_(key.path)) continue;
      refuse(key.path,
             fmt::format("needs parallel.strategy: fsdp, and that is {}", parallel.strategy));
    }
  }
  needs("parallel.tls", !parallel.tls || parallel.backend != "gloo",
        "another parallel.backend than gloo, which encrypts nothing");
  needs("parallel.sync_bn_group_size", parallel.sync_bn || parallel.sync_bn_group_size == 0,
        "parallel.sync_bn: true");
  for (const char* name : {"hook_rank", "hook_start_step"}) {
    needs(std::string("parallel.") + name, parallel.hook == "power_sgd",
          "parallel.hook: power_sgd");
  }
  needs("parallel.hook_fraction", parallel.hook == "top_k", "parallel.hook: top_k");
  for (const char* name : {"initial_scale", "growth_interval"}) {
    needs(std::string("mixed_precision.") + name, config_.mixed_precision.dtype == "fp16",
          "mixed_precision.dtype: fp16");
  }
}

void Checks::fsdp() {
  const auto& parallel = config_.parallel;
  const auto& fsdp = parallel.fsdp;
  const std::string& policy = fsdp.auto_wrap_policy;
  for (const char* name : {"bucket_cap_mb", "unused", "zero", "hook"}) {
    needs(std::string("parallel.") + name, false, "parallel.strategy: ddp, and that is fsdp");
  }
  const bool by_size = policy == "SIZE_BASED_WRAP";
  const bool by_class = policy == "TRANSFORMER_BASED_WRAP";
  const bool chooses = policy == "AUTO";
  if (by_size && fsdp.min_num_params == 0) {
    refuse("parallel.fsdp.auto_wrap_policy",
           "SIZE_BASED_WRAP needs parallel.fsdp.min_num_params, 1 or more");
  }
  needs("parallel.fsdp.min_num_params", by_size || chooses,
        "parallel.fsdp.auto_wrap_policy: SIZE_BASED_WRAP");
  needs("parallel.fsdp.transformer_layer_cls_to_wrap", by_class || chooses,
        "parallel.fsdp.auto_wrap_policy: TRANSFORMER_BASED_WRAP");
  if (chooses && fsdp.min_num_params > 0 && !fsdp.transformer_layer_cls_to_wrap.empty()) {
    refuse("parallel.fsdp.min_num_params",
           "transformer_layer_cls_to_wrap is given, too: give one of them, or auto_wrap_policy");
  }
  if (by_class && fsdp.transformer_layer_cls_to_wrap.empty() &&
      config_.model.kind != "transformer") {
    refuse("parallel.fsdp.auto_wrap_policy",
           "TRANSFORMER_BASED_WRAP needs parallel.fsdp.transformer_layer_cls_to_wrap");
  }
  needs("parallel.fsdp.activation_checkpointing", policy != "NO_WRAP",
        "units: parallel.fsdp.auto_wrap_policy is NO_WRAP");
  if (fsdp.activation_checkpointing && config_.training.activation_checkpointing != "none") {
    refuse("parallel.fsdp.activation_checkpointing",
           "training.activation_checkpointing is given, too: give one of them");
  }
}

void Checks::data() {
  const auto& data = config_.data;
  if (data.kind == "csv" && data.csv.delimiter.size() != 1) {
    refuse("data.delimiter", "need one character");
  }
  if (data.kind == "images" && data.images.channels == 2) {
    refuse("data.channels", "3 or 1");
  }
  for (const auto& stage : config_.training.curriculum) {
    const bool has_two = data.kind == "npy" || data.kind == "idx";
    if (!stage.path.empty() && data.kind == "synthetic-regression") {
      refuse("training.curriculum", "path: data.kind synthetic-regression is in no files");
    } else if (has_two && stage.path.empty() != stage.targets_path.empty()) {
      refuse("training.curriculum", fmt::format("data.kind {} needs {}, too", data.kind,
                                                stage.path.empty() ? "path" : "targets_path"));
    } else if (!has_two && !stage.targets_path.empty()) {
      refuse("training.curriculum",
             fmt::format("targets_path: data.kind {} has its targets in path", data.kind));
    }
  }
  for (const char* name : {"targets_path", "validation_targets_path"}) {
    const bool is_first = std::string(name) == "targets_path";
    const std::string& features = is_first ? data.path : data.validation_path;
    const std::string& targets = is_first ? data.targets_path : data.validation_targets_path;
    const char* const first = is_first ? "path" : "validation_path";
    const bool has_two = data.kind == "npy" || data.kind == "idx";
    if (has_two && features.empty() != targets.empty()) {
      problems_.add(
          origin_of_("data.kind"),
          fmt::format("data.kind {} needs data.{}, as data.{} is given: samples and targets are "
                      "two files (or leave both out)",
                      data.kind, features.empty() ? first : name, features.empty() ? name : first));
    }
  }
  if (data.validation_fraction > 0 && !data.validation_path.empty()) {
    refuse("data.validation_fraction", "data.validation_path is given, too: give one of them");
  }
  const bool needs_path = data.kind == "csv" || data.kind == "npy" || data.kind == "idx" ||
                          data.kind == "safetensors" || data.kind == "images" ||
                          data.kind == "tokens" || data.kind == "mnist";
  if (needs_path && data.path.empty()) {
    problems_.add(origin_of_("data.kind"), fmt::format("data.kind {} needs data.path", data.kind));
  }
}

void Checks::language_model() {
  const auto& [model, data, training] = std::tie(config_.model, config_.data, config_.training);
  const auto is = [](const std::string& kind, std::initializer_list<std::string_view> known) {
    return std::find(known.begin(), known.end(), kind) != known.end();
  };
  const bool is_transformer = model.kind == "transformer";
  // A model of the program's may be one, too, and its data may be tokens.
  const bool may_be = !is(model.kind, {"linear", "mlp", "convnet", "resnet18"});
  const bool has_tokens =
      !is(data.kind, {"fashion-mnist", "mnist", "idx", "csv", "images", "synthetic-regression"});
  if (data.kind == "tokens" && !may_be) {
    refuse("data.kind",
           fmt::format("tokens are for model.kind transformer, and that is {}", model.kind));
  }
  needs("training.activation_checkpointing", may_be, "model.kind: transformer");
  needs("training.sample.prompt", may_be, "model.kind: transformer");
  needs("training.sample.prompt", training.eval_strategy != "no",
        "evaluations: training.eval_strategy is no");
  for (const char* name : {"max_new_tokens", "temperature", "top_k", "top_p"}) {
    needs(std::string("training.sample.") + name, !training.sample.prompt.empty(),
          "training.sample.prompt");
  }
  if (!is_transformer) return;
  if (!has_tokens) {
    refuse("model.kind",
           fmt::format("transformer learns from tokens, and data.kind {} has none: use tokens",
                       data.kind));
  }
  if (is(training.loss, {"mse", "l1", "huber", "bce_with_logits", "nll"})) {
    refuse("training.loss", "a transformer's is cross_entropy, of the next token");
  }
  if (training.label_smoothing > 0) {
    refuse("training.label_smoothing", "not with model.kind transformer");
  }
  for (const auto& metric : training.metrics) {
    if (!is(metric, {"auc", "mse", "rmse", "mae", "r2", "confusion_matrix"})) continue;
    refuse("training.metrics",
           fmt::format("{} is none of a transformer's: perplexity, accuracy, top_k", metric));
  }
  if (!model.transformer.pretrained.empty()) {
    for (const Key& key : schema_.keys()) {
      if (!belongs_to(key, model.kind) || !is_given_(key.path)) continue;
      if (key.section() != "model") continue;
      const std::string why = replaced_by(config_, key.path);
      if (!why.empty()) refuse(key.path, why + ": leave it out");
    }
    return;
  }
  transformer_sizes();
}

void Checks::transformer_sizes() {
  const auto& [data, training] = std::tie(config_.data, config_.training);
  const auto& sizes = config_.model.transformer;
  const int64_t kv_heads = sizes.kv_heads > 0 ? sizes.kv_heads : sizes.heads;
  if (sizes.head_dim == 0 && sizes.hidden % sizes.heads != 0) {
    refuse("model.hidden",
           fmt::format("{} is not a multiple of model.heads {}", sizes.hidden, sizes.heads));
  } else if ((sizes.head_dim > 0 ? sizes.head_dim : sizes.hidden / sizes.heads) % 2 != 0) {
    refuse(sizes.head_dim > 0 ? "model.head_dim" : "model.hidden",
           "a head's width has to be even, for rotary positions");
  }
  if (sizes.heads % kv_heads != 0) {
    refuse("model.kv_heads", fmt::format("model.heads {} is not a multiple of it", sizes.heads));
  }
  if (data.kind == "tokens" && data.tokens.sequence_length > sizes.max_length) {
    refuse("data.sequence_length", fmt::format("{} is above model.max_length {}",
                                               data.tokens.sequence_length, sizes.max_length));
  }
  if (!training.sample.prompt.empty() && training.sample.max_new_tokens >= sizes.max_length) {
    refuse("training.sample.max_new_tokens",
           fmt::format("{}, with the prompt, are more than model.max_length {}",
                       training.sample.max_new_tokens, sizes.max_length));
  }
}

void Checks::launch() {
  const std::string& log = config_.logging.metrics_file;
  if (!log.empty() && log.substr(log.find_last_of('/') + 1) != "metrics.jsonl") {
    refuse("logging.metrics_file",
           "a run's log is called metrics.jsonl: give FOLDER/metrics.jsonl");
  }
  const bool has_folder = !log.empty() || !config_.logging.output_dir.empty();
  needs("logging.tensorboard", has_folder || !config_.logging.tensorboard, "logging.output_dir");
  const auto& traced = config_.logging.trace_steps;
  needs("logging.trace_steps", has_folder || traced.empty(), "logging.output_dir");
  if (!traced.empty() &&
      (traced.size() != 2 || traced[1] < traced[0] || traced[1] - traced[0] >= 1000)) {
    refuse("logging.trace_steps",
           "give the first and the last of at most 1,000 steps, as in [10, 12]");
  }
  const std::string& address = config_.logging.prometheus_address;
  try {
    if (!address.empty()) Endpoint::parse("logging.prometheus_address", address, 0);
  } catch (const ConfigError&) {
    refuse("logging.prometheus_address",
           fmt::format("'{}': give HOST or HOST:PORT, as 127.0.0.1:9464", address));
  }
  const auto& launch = config_.launch;
  const auto is_number = [](const std::string& text) {
    return !text.empty() && text.size() < 6 &&
           std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  };
  const std::string& ranks = launch.nproc_per_node;
  const bool is_word = ranks == "cpu" || ranks == "gpu" || ranks == "auto";
  if (!is_word && (!is_number(ranks) || std::stoi(ranks) < 1 || std::stoi(ranks) > 4096)) {
    refuse("launch.nproc_per_node",
           fmt::format("'{}' is neither a number from 1 to 4096 nor cpu, gpu or auto", ranks));
  }
  const size_t colon = std::min(launch.nnodes.find(':'), launch.nnodes.size());
  const std::string least = launch.nnodes.substr(0, colon);
  const std::string most = colon < launch.nnodes.size() ? launch.nnodes.substr(colon + 1) : least;
  if (!is_number(least) || !is_number(most) || std::stoi(least) < 1 ||
      std::stoi(most) < std::stoi(least)) {
    refuse("launch.nnodes",
           fmt::format("'{}' is neither a number nor MIN:MAX, 1 or more", launch.nnodes));
  }
}

}  // namespace

void check_together(const Schema& schema, const RunConfig& config, const OriginOf& origin_of,
                    const IsGiven& is_given, Problems& problems) {
  Checks checks(schema, config, origin_of, is_given, problems);
  checks.training();
  checks.evaluation();
  checks.parallel();
  checks.data();
  checks.language_model();
  checks.launch();
}

}  // namespace lockstep::train
