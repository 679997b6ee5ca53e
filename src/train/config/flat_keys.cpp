#include "train/config/flat_keys.h"

#include <fmt/format.h>

#include <map>
#include <string_view>

#include "core/words.h"
#include "train/config/value.h"

namespace lockstep::train {
namespace {

using Translate = std::function<FlatMeaning(const YAML::Node&)>;

std::string word_of(const YAML::Node& node) {
  return lower_case(node.IsScalar() ? node.Scalar() : "");
}

bool says_no(const YAML::Node& node) {
  return node.IsScalar() ? lockstep::says_no(node.Scalar()) : node.size() == 0;
}

bool says_yes(const YAML::Node& node) {
  const std::string word = word_of(node);
  return word == "true" || word == "yes" || word == "on" || word == "1";
}

FlatMeaning refused(const std::string& why) { return {.problem = why}; }

FlatMeaning not_a_flag(const YAML::Node& node) {
  return refused(fmt::format("{} is not true or false", excerpt(node)));
}

Translate rename(const std::string& path) {
  return [path](const YAML::Node& node) { return FlatMeaning{.values = {{path, node}}}; };
}

// true and false as two values of `path`; an empty one means that nothing is said.
Translate flag(const std::string& path, const std::string& yes, const std::string& no,
               const std::string& remark = "") {
  return [=](const YAML::Node& node) -> FlatMeaning {
    if (!says_yes(node) && !says_no(node)) return not_a_flag(node);
    const std::string& value = says_yes(node) ? yes : no;
    if (value.empty()) return {};
    return {.values = {{path, YAML::Node(value)}}, .remark = says_yes(node) ? remark : ""};
  };
}

// Accepted, and answered once when it says `yes` or anything.
Translate needless(const std::string& reason) {
  return [reason](const YAML::Node& node) -> FlatMeaning {
    if (!node.IsScalar()) return not_a_flag(node);
    return {.remark = "has no effect: " + reason};
  };
}

Translate nothing() {
  return [](const YAML::Node&) { return FlatMeaning{}; };
}

Translate refused_unless_no(const std::string& reason) {
  return [reason](const YAML::Node& node) {
    // TorchDynamo's section turns it off by this word.
    const YAML::Node backend = node.IsMap() ? node["dynamo_backend"] : YAML::Node();
    const bool is_off = says_no(node) || (backend && !backend.IsNull() && says_no(backend));
    return is_off ? FlatMeaning{} : refused("is not supported: " + reason);
  };
}

// Words of another program for those of ours.
Translate words(const std::string& path, const std::map<std::string, std::string>& table) {
  return [path, table](const YAML::Node& node) -> FlatMeaning {
    const auto found = table.find(word_of(node));
    if (found != table.end()) return {.values = {{path, YAML::Node(found->second)}}};
    std::string known;
    for (const auto& [word, unused] : table) known += (known.empty() ? "" : ", ") + word;
    return refused(fmt::format("{} is none of {}", excerpt(node), known));
  };
}

FlatMeaning resume(const YAML::Node& node) {
  if (says_no(node)) return {};
  const std::string word = word_of(node);
  const bool is_latest = says_yes(node) || word == "latest" || word == "checkpoint-latest";
  return {.values = {{"checkpoint.resume", is_latest ? YAML::Node("latest") : node}}};
}

FlatMeaning max_steps(const YAML::Node& node) {
  return {.values = {{"training.max_steps", word_of(node) == "-1" ? YAML::Node("0") : node}}};
}

// Of Hugging Face's trainer, which puts `eval_` before the names of metrics.
FlatMeaning best_metric(const YAML::Node& node) {
  constexpr std::string_view kPrefix = "eval_";
  const std::string name = node.IsScalar() ? node.Scalar() : "";
  const bool has_prefix = name.starts_with(kPrefix) && name.size() > kPrefix.size();
  return {.values = {{"checkpoint.best_metric",
                      has_prefix ? YAML::Node(name.substr(kPrefix.size())) : node}}};
}

FlatMeaning report_to(const YAML::Node& node) {
  bool is_wanted = false;
  FlatMeaning meaning;
  for (size_t i = 0; i < (node.IsSequence() ? node.size() : 1); ++i) {
    const YAML::Node item = node.IsSequence() ? node[i] : node;
    if (!item.IsScalar()) return refused(fmt::format("{} is no text", excerpt(item)));
    const std::string word = word_of(item);
    if (word == "tensorboard" || word == "all") {
      is_wanted = true;
    } else if (!says_no(item)) {
      meaning.remark = fmt::format("{} has no effect: logs are files of logging.output_dir", word);
    }
  }
  if (is_wanted) meaning.values = {{"logging.tensorboard", YAML::Node("true")}};
  return meaning;
}

FlatMeaning broadcast_buffers(const YAML::Node& node) {
  if (says_yes(node)) return {.values = {{"parallel.buffers", YAML::Node("broadcast")}}};
  if (!says_no(node)) return not_a_flag(node);
  return refused(
      "false would let ranks have buffers of their own, and evaluations and checkpoints are of one "
      "model: leave it out, or give parallel.buffers: average");
}

FlatMeaning distributed_type(const YAML::Node& node) {
  const std::string word = word_of(node);
  if (word == "no" || word == "false") return {};
  if (word == "fsdp") return {.values = {{"parallel.strategy", YAML::Node("fsdp")}}};
  if (word == "multi_cpu") return {.values = {{"parallel.device", YAML::Node("cpu")}}};
  if (word == "multi_gpu") return {.values = {{"parallel.device", YAML::Node("cuda")}}};
  return refused(fmt::format("{} is none of NO, MULTI_CPU, MULTI_GPU, FSDP", excerpt(node)));
}

FlatMeaning schedule_type(const YAML::Node& node) {
  if (word_of(node) == "constant_with_warmup") {
    return {.values = {{"schedule.kind", YAML::Node("constant")}}};
  }
  return words("schedule.kind", {{"linear", "linear"},
                                 {"cosine", "cosine"},
                                 {"constant", "constant"},
                                 {"polynomial", "polynomial"},
                                 {"reduce_lr_on_plateau", "plateau"}})(node);
}

const char* kLinear =
    "means x N, N the number of ranks: guides in circulation compute x sqrt(N) under this name; "
    "optimizer.lr_scaling: sqrt is that";

std::vector<FlatKey> make_keys() {
  std::vector<FlatKey> keys;
  const auto add = [&keys](const std::string& name, const std::string& meaning,
                           Translate translate) {
    keys.push_back({name, meaning, std::move(translate)});
  };
  const auto same = [&add](const std::string& name, const std::string& path) {
    add(name, "`" + path + "`", rename(path));
  };
  for (const char* name : {"batch_size", "per_device_train_batch_size"}) {
    same(name, "training.batch_size");
  }
  same("per_device_eval_batch_size", "training.eval_batch_size");
  for (const char* name : {"gradient_accumulation_steps", "max_grad_norm", "seed", "epochs", "loss",
                           "eval_strategy", "eval_steps", "metrics", "lanes"}) {
    const std::string section = std::string(name) == "lanes" ? "parallel." : "training.";
    same(name, section + name);
  }
  same("num_train_epochs", "training.epochs");
  same("evaluation_strategy", "training.eval_strategy");
  same("label_smoothing_factor", "training.label_smoothing");
  add("max_steps", "`training.max_steps`; -1: 0", max_steps);
  for (const char* name : {"learning_rate", "base_learning_rate", "lr"}) {
    same(name, "optimizer.learning_rate");
  }
  same("lr_scaling", "optimizer.lr_scaling");
  add("use_linear_scaling", "true: `optimizer.lr_scaling: linear`, exactly x N",
      flag("optimizer.lr_scaling", "linear", "none", kLinear));
  same("weight_decay", "optimizer.weight_decay");
  same("momentum", "optimizer.momentum");
  same("adam_beta1", "optimizer.beta1");
  same("adam_beta2", "optimizer.beta2");
  same("adam_epsilon", "optimizer.eps");
  add("optim", "`optimizer.kind`",
      words("optimizer.kind", {{"sgd", "sgd"},
                               {"adam", "adam"},
                               {"adamw", "adamw"},
                               {"adamw_torch", "adamw"},
                               {"adamw_torch_fused", "adamw"}}));
  same("warmup_steps", "schedule.warmup_steps");
  same("warmup_ratio", "schedule.warmup_ratio");
  add("lr_scheduler_type", "`schedule.kind`", schedule_type);
  same("logging_steps", "logging.logging_steps");
  same("output_dir", "logging.output_dir");
  for (const char* name : {"save_strategy", "save_steps", "save_total_limit"}) {
    same(name, std::string("checkpoint.") + name);
  }
  add("resume_from_checkpoint",
      "`checkpoint.resume`; true, latest and checkpoint-latest: latest; false: not", resume);
  add("metric_for_best_model", "`checkpoint.best_metric`, without `eval_`", best_metric);
  add("greater_is_better", "`checkpoint.best_mode`", flag("checkpoint.best_mode", "max", "min"));
  same("dataloader_num_workers", "data.workers");
  same("dataloader_drop_last", "data.drop_last");
  same("data_seed", "training.seed");
  add("bf16", "true: `mixed_precision.dtype: bf16`", flag("mixed_precision.dtype", "bf16", ""));
  add("fp16", "true: `mixed_precision.dtype: fp16`", flag("mixed_precision.dtype", "fp16", ""));
  add("gradient_checkpointing", "true: `training.activation_checkpointing: full`",
      flag("training.activation_checkpointing", "full", ""));
  add("load_best_model_at_end",
      "`checkpoint.restore_best`; without `metric_for_best_model`, by the loss",
      rename("checkpoint.restore_best"));
  add("report_to", "tensorboard, all: `logging.tensorboard: true`; others have no effect",
      report_to);
  add("logging_dir", "accepted; has no effect",
      needless("event files are in the folder `tensorboard` of logging.output_dir"));
  add("overwrite_output_dir", "accepted; has no effect",
      needless("a folder that has another run's checkpoints is refused: remove it"));
  add("push_to_hub", "refused, unless no", refused_unless_no("nothing is uploaded"));
  add("dataloader_pin_memory", "accepted; has no effect",
      needless("batches for a GPU are in pinned memory in any case"));

  for (const char* name : {"sync_bn", "use_sync_bn"}) same(name, "parallel.sync_bn");
  same("sync_bn_group_size", "parallel.sync_bn_group_size");
  for (const std::string prefix : {"", "ddp_"}) {
    same(prefix + "bucket_cap_mb", "parallel.bucket_cap_mb");
    add(prefix + "broadcast_buffers", "true: `parallel.buffers: broadcast`; false is refused",
        broadcast_buffers);
    add(prefix + "find_unused_parameters", "accepted; has no effect",
        needless("parameters that backward does not reach are found in any case, at no cost; "
                 "parallel.unused: error makes them an error"));
  }
  same("ddp_timeout", "parallel.timeout_seconds");
  add("gradient_as_bucket_view", "accepted; has no effect",
      needless("gradients are views of their buckets in any case"));
  add("static_graph", "accepted; has no effect",
      needless("what it promises is not needed: hooks follow each backward as it is"));

  add("distributed_type", "`parallel.strategy` or `parallel.device`", distributed_type);
  same("num_processes", "launch.nproc_per_node");
  same("num_machines", "launch.nnodes");
  same("machine_rank", "launch.node_rank");
  same("main_process_ip", "launch.master_addr");
  same("main_process_port", "launch.master_port");
  same("rdzv_backend", "launch.rdzv_backend");
  add("use_cpu", "true: `parallel.device: cpu`", flag("parallel.device", "cpu", ""));
  add("use_fsdp", "true: `parallel.strategy: fsdp`", flag("parallel.strategy", "fsdp", ""));
  add("enable_cpu_affinity", "true: `launch.bind: numa`", flag("launch.bind", "numa", ""));
  add("compute_environment", "LOCAL_MACHINE", [](const YAML::Node& node) {
    return word_of(node) == "local_machine"
               ? FlatMeaning{}
               : refused(fmt::format("{} is not supported: only LOCAL_MACHINE", excerpt(node)));
  });
  add("gpu_ids", "all; others are refused", [](const YAML::Node& node) {
    return word_of(node) == "all" ? FlatMeaning{}
                                  : refused("is not supported: set CUDA_VISIBLE_DEVICES");
  });
  add("same_network", "accepted; has no effect", nothing());
  add("main_training_function", "accepted; has no effect", nothing());
  add("debug", "accepted; has no effect",
      needless("calls that do not match are found in any case"));
  for (const char* name : {"downcast_bf16", "tpu_use_cluster", "tpu_use_sudo", "tpu_env"}) {
    add(name, "refused, unless no", refused_unless_no("it is about TPUs"));
  }
  for (const char* name :
       {"deepspeed_config", "megatron_lm_config", "deepspeed", "dynamo_config"}) {
    add(name, "refused, unless empty", refused_unless_no("there is no such engine here"));
  }
  return keys;
}

}  // namespace

const std::vector<FlatKey>& flat_keys() {
  static const std::vector<FlatKey> keys = make_keys();
  return keys;
}

const FlatKey* find_flat_key(const std::string& name) {
  for (const FlatKey& key : flat_keys()) {
    if (key.name == name) return &key;
  }
  return nullptr;
}

bool is_flat_key(const std::string& name) {
  return find_flat_key(name) != nullptr || name == "fsdp_config" || name.starts_with("fsdp_");
}

}  // namespace lockstep::train
