#include "launch/options/accelerate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <functional>

#include "core/files/read_file.h"
#include "core/nearest.h"
#include "core/number.h"
#include "core/words.h"
#include "lockstep/core/error.h"

namespace lockstep::launch {
namespace {

using Words = std::vector<std::string>;

constexpr size_t kMostBytes = 1 << 20;

const Words kPrecisions = {"no", "fp16", "bf16"};
const Words kTypes = {"NO", "MULTI_CPU", "MULTI_GPU", "FSDP"};
const Words kSharding = {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD",
                         "HYBRID_SHARD_ZERO2"};

// A file while it is read.
class File {
 public:
  File(std::string name, Accelerate& into) : name_(std::move(name)), into_(into) {}

  using Reader = std::function<void(const YAML::Node&)>;
  using Readers = std::map<std::string, Reader>;

  void read(const YAML::Node& root);
  void read_fsdp(const YAML::Node& node) const;
  Readers fsdp_readers() const;  // by key, without the prefix fsdp_

 private:
  [[noreturn]] void fail(const YAML::Node& at, const std::string& text) const {
    const std::string line = at.Mark().is_null() ? "" : fmt::format(":{}", at.Mark().line + 1);
    throw ConfigError(fmt::format("[accelerate] {}{}: {}", name_, line, text));
  }
  // Calls each key's reader; `shorten` makes of a key what the readers are listed under.
  void read_keys(const YAML::Node& map, const Readers& readers,
                 const std::function<std::string(std::string)>& shorten) const;

  std::string text(const std::string& key, const YAML::Node& node) const;
  // Words with commas between them, or a list of words.
  std::string list(const std::string& key, const YAML::Node& node) const;
  std::string one_of(const std::string& key, const YAML::Node& node, const Words& values) const;
  int number(const std::string& key, const YAML::Node& node, int low, int high) const;
  bool flag(const std::string& key, const YAML::Node& node) const;
  void read_ipex(const YAML::Node& node) const;

  Reader into_text(const std::string& key, std::string& value) const;
  Reader into_number(const std::string& key, std::optional<int>& value, int low, int high) const;
  Reader into_flag(const std::string& key, bool& value) const;
  // A key without a meaning here; a value other than `harmless` gives a remark.
  Reader unused(const std::string& key, const Words& harmless, const std::string& reason) const;
  Reader refused_unless_off(const std::string& key, const std::string& reason) const;

  std::string name_;
  Accelerate& into_;
};

void File::read_keys(const YAML::Node& map, const Readers& readers,
                     const std::function<std::string(std::string)>& shorten) const {
  if (!map.IsMap()) fail(map, "expected settings as KEY: VALUE lines");
  for (const auto& entry : map) {
    if (!entry.first.IsScalar()) fail(entry.first, "a key has to be a word");
    const std::string key = entry.first.Scalar();
    const auto reader = readers.find(shorten(key));
    if (reader == readers.end()) {
      Words known;
      for (const auto& [name, unused] : readers) known.push_back(name);
      fail(entry.first, fmt::format("unknown key '{}'{}", key, hint_of(shorten(key), known)));
    }
    if (!entry.second.IsNull()) reader->second(entry.second);
  }
}

std::string File::text(const std::string& key, const YAML::Node& node) const {
  if (!node.IsScalar()) fail(node, fmt::format("{} has to be a text", key));
  return node.Scalar();
}

std::string File::list(const std::string& key, const YAML::Node& node) const {
  if (!node.IsSequence()) return text(key, node);
  Words words;
  for (const auto& word : node) words.push_back(text(key, word));
  return fmt::format("{}", fmt::join(words, ","));
}

std::string File::one_of(const std::string& key, const YAML::Node& node,
                         const Words& values) const {
  const std::string value = text(key, node);
  const auto found = std::find_if(values.begin(), values.end(), [&](const std::string& known) {
    // YAML reads no as false; accelerate writes 'no' and NO.
    return value == known || (lower_case(known) == "no" && !value.empty() && says_no(value));
  });
  if (found != values.end()) return *found;
  fail(node, fmt::format("{}: '{}' is none of {}", key, value, fmt::join(values, ", ")));
}

int File::number(const std::string& key, const YAML::Node& node, int low, int high) const {
  const std::string digits = text(key, node);
  const auto value = whole_number_from<int>(digits);
  if (!value || *value < low || *value > high) {
    fail(node, fmt::format("{}: '{}' is not a whole number from {} to {}", key, digits, low, high));
  }
  return *value;
}

bool File::flag(const std::string& key, const YAML::Node& node) const {
  const std::string word = lower_case(text(key, node));
  if (word == "true" || word == "yes" || word == "on" || word == "1") return true;
  if (word == "false" || word == "no" || word == "off" || word == "0") return false;
  fail(node, fmt::format("{}: '{}' is neither true nor false", key, word));
}

File::Reader File::into_text(const std::string& key, std::string& value) const {
  return [this, key, &value](const YAML::Node& node) { value = text(key, node); };
}
File::Reader File::into_number(const std::string& key, std::optional<int>& value, int low,
                               int high) const {
  return [this, key, &value, low, high](const YAML::Node& node) {
    value = number(key, node, low, high);
  };
}
File::Reader File::into_flag(const std::string& key, bool& value) const {
  return [this, key, &value](const YAML::Node& node) { value = flag(key, node); };
}

File::Reader File::unused(const std::string& key, const Words& harmless,
                          const std::string& reason) const {
  return [this, key, harmless, reason](const YAML::Node& node) {
    const std::string value = lower_case(text(key, node));
    if (std::find(harmless.begin(), harmless.end(), value) != harmless.end()) return;
    into_.remarks.push_back(
        fmt::format("{}:{}: {} has no effect: {}", name_, node.Mark().line + 1, key, reason));
  };
}

File::Reader File::refused_unless_off(const std::string& key, const std::string& reason) const {
  return [this, key, reason](const YAML::Node& node) {
    if (node.IsScalar() ? says_no(node.Scalar()) : node.size() == 0) return;
    // TorchDynamo is off by this word.
    const YAML::Node backend = node.IsMap() ? node["dynamo_backend"] : YAML::Node();
    if (backend && backend.IsScalar() && says_no(backend.Scalar())) return;
    fail(node, fmt::format("{} is not supported: {}", key, reason));
  };
}

File::Readers File::fsdp_readers() const {
  const auto take = [this](const std::string& key, const std::string& as,
                           const std::function<std::string(const YAML::Node&)>& value) {
    return std::pair<std::string, Reader>(
        key, [this, as, value](const YAML::Node& node) { into_.fsdp[as] = value(node); });
  };
  const auto yes_no = [&](const std::string& key, const std::string& as) {
    return take(key, as,
                [this, key](const YAML::Node& n) { return flag(key, n) ? "true" : "false"; });
  };
  const auto word = [&](const std::string& key, const Words& values) {
    return take(key, key,
                [this, key, values](const YAML::Node& n) { return one_of(key, n, values); });
  };
  const auto any = [&](const std::string& key, const std::string& as) {
    return take(key, as, [this, key](const YAML::Node& n) { return text(key, n); });
  };
  return {
      take("sharding_strategy", "sharding_strategy",
           [this](const YAML::Node& n) {
             const std::string value = text("sharding_strategy", n);
             if (value.size() == 1 && value[0] >= '1' && value[0] <= '5') {
               return kSharding[static_cast<size_t>(value[0] - '1')];
             }
             return one_of("sharding_strategy", n, kSharding);
           }),
      take("min_num_params", "min_num_params",
           [this](const YAML::Node& n) {
             return std::to_string(number("min_num_params", n, 0, 2'000'000'000));
           }),
      take("version", "version",
           [this](const YAML::Node& n) {
             return one_of("fsdp_version", n, {"1", "2"});
           }),
      word("auto_wrap_policy", {"TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"}),
      word("backward_prefetch", {"BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"}),
      word("state_dict_type", {"FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"}),
      // true, false, or a strategy's name where version 1 is meant.
      any("reshard_after_forward", "reshard_after_forward"),
      take("transformer_layer_cls_to_wrap", "transformer_cls_to_wrap",
           [this](const YAML::Node& n) { return list("transformer_layer_cls_to_wrap", n); }),
      any("ignored_modules", "ignored_modules"),
      yes_no("forward_prefetch", "forward_prefetch"),
      yes_no("offload_params", "offload_params"),
      yes_no("cpu_offload", "offload_params"),
      yes_no("use_orig_params", "use_orig_params"),
      yes_no("sync_module_states", "sync_module_states"),
      yes_no("cpu_ram_efficient_loading", "cpu_ram_efficient_loading"),
      yes_no("activation_checkpointing", "activation_checkpointing"),
      yes_no("activation_checkpointing_offload", "activation_checkpointing_offload"),
  };
}

void File::read_fsdp(const YAML::Node& map) const {
  read_keys(map, fsdp_readers(),
            [](std::string key) { return key.starts_with("fsdp_") ? key.substr(5) : key; });
}

// `accelerate config` writes it on machines without GPUs.
void File::read_ipex(const YAML::Node& map) const {
  const std::string reason = "Intel's extension is for PyTorch in Python";
  if (map.IsScalar()) return unused("ipex_config", {"", "false"}, reason)(map);
  if (map.size() == 0) return;
  const Readers readers = {{"ipex", unused("ipex", {"false"}, reason)},
                           {"use_xpu", unused("use_xpu", {"false"}, reason)}};
  read_keys(map, readers, [](std::string key) { return key; });
}

void File::read(const YAML::Node& root) {
  Readers readers;
  const auto number_key = [&](const char* key, std::optional<int>& value, int low, int high) {
    readers[key] = into_number(key, value, low, high);
  };
  number_key("num_processes", into_.num_processes, -1, 1 << 20);
  number_key("num_machines", into_.num_machines, 1, 50'000);
  number_key("machine_rank", into_.machine_rank, 0, 50'000);
  number_key("main_process_port", into_.main_process_port, 0, 65535);
  readers["main_process_ip"] = into_text("main_process_ip", into_.main_process_ip);
  readers["rdzv_backend"] = into_text("rdzv_backend", into_.rdzv_backend);
  readers["gpu_ids"] = into_text("gpu_ids", into_.gpu_ids);
  readers["use_cpu"] = into_flag("use_cpu", into_.use_cpu);
  readers["debug"] = into_flag("debug", into_.debug);
  readers["fsdp_config"] = [this](const YAML::Node& node) { read_fsdp(node); };
  readers["ipex_config"] = [this](const YAML::Node& node) { read_ipex(node); };
  readers["mixed_precision"] = [this](const YAML::Node& node) {
    into_.mixed_precision = one_of("mixed_precision", node, kPrecisions);
  };
  readers["fp16"] = [this](const YAML::Node& node) {
    into_.mixed_precision = flag("fp16", node) ? "fp16" : "no";
  };
  readers["distributed_type"] = [this](const YAML::Node& node) {
    into_.distributed_type = one_of("distributed_type", node, kTypes);
  };
  readers["compute_environment"] = [this](const YAML::Node& node) {
    one_of("compute_environment", node, {"LOCAL_MACHINE"});
  };
  readers["same_network"] =
      unused("same_network", {"true", "false"}, "hosts are reached as routes say");
  readers["main_training_function"] = [this](const YAML::Node& node) {
    text("main_training_function", node);  // of a notebook; a program has its own main()
  };
  readers["enable_cpu_affinity"] =
      unused("enable_cpu_affinity", {"false"}, "say --numa-binding node");
  for (const char* key : {"deepspeed_config", "megatron_lm_config", "parallelism_config",
                          "mpirun_config", "fp8_config", "dynamo_config"}) {
    readers[key] = refused_unless_off(key, "there is no such engine here");
  }
  for (const char* key : {"downcast_bf16", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_name",
                          "tpu_zone", "tpu_env", "command_file", "commands"}) {
    readers[key] = refused_unless_off(key, "it is about TPUs");
  }
  read_keys(root, readers, [](std::string key) { return key; });
}

}  // namespace

Accelerate parse_accelerate(const std::string& text, const std::string& name) {
  if (text.size() > kMostBytes) {
    throw ConfigError(fmt::format("[accelerate] {}: {} bytes; a configuration has at most {}", name,
                                  text.size(), kMostBytes));
  }
  Accelerate settings;
  try {
    const YAML::Node root = YAML::Load(text);
    if (!root.IsNull()) File(name, settings).read(root);
  } catch (const YAML::Exception& error) {
    throw ConfigError(fmt::format("[accelerate] {}:{}: {}", name, error.mark.line + 1, error.msg));
  }
  return settings;
}

void Accelerate::set_fsdp(const std::string& key, const std::string& value) {
  YAML::Node map;
  map[key] = value;
  File("--fsdp_" + key, *this).read_fsdp(map);
}

std::vector<std::string> fsdp_keys() {
  Accelerate none;
  std::vector<std::string> keys;
  for (const auto& [key, unused] : File("", none).fsdp_readers()) keys.push_back(key);
  return keys;
}

Accelerate read_accelerate(const std::string& path) {
  return parse_accelerate(read_file(path, "[accelerate] --config_file " + path), path);
}

std::map<std::string, std::string> Accelerate::flags() const {
  std::map<std::string, std::string> result;
  const int machines = num_machines.value_or(1);
  const int processes = num_processes.value_or(-1);
  if (processes == 0 || processes < -1) {
    throw ConfigError(fmt::format("[accelerate] num_processes {}: need 1 or more", processes));
  }
  if (processes > 0) {
    if (processes % machines != 0) {
      throw ConfigError(
          fmt::format("[accelerate] num_processes {} over num_machines {}: each machine gets the "
                      "same number, so the one has to be a multiple of the other",
                      processes, machines));
    }
    result["--nproc-per-node"] = std::to_string(processes / machines);
  } else if (distributed_type == "MULTI_GPU") {
    result["--nproc-per-node"] = "gpu";
  } else if (!distributed_type.empty() && distributed_type != "NO") {
    throw ConfigError(
        fmt::format("[accelerate] distributed_type {} needs num_processes", distributed_type));
  }
  if (main_process_port) result["--master-port"] = std::to_string(*main_process_port);
  if (machines == 1) return result;
  result["--nnodes"] = std::to_string(machines);
  if (!rdzv_backend.empty()) result["--rdzv-backend"] = rdzv_backend;
  if (machine_rank) result["--node-rank"] = std::to_string(*machine_rank);
  if (main_process_ip.empty()) {
    throw ConfigError(
        fmt::format("[accelerate] num_machines {} needs main_process_ip: the address of the "
                    "machine with machine_rank 0",
                    machines));
  }
  result["--master-addr"] = main_process_ip;
  return result;
}

std::map<std::string, std::string> Accelerate::environment() const {
  std::map<std::string, std::string> result;
  result["ACCELERATE_MIXED_PRECISION"] = mixed_precision.empty() ? "no" : mixed_precision;
  if (use_cpu || distributed_type == "MULTI_CPU") result["ACCELERATE_USE_CPU"] = "True";
  if (debug) result["ACCELERATE_DEBUG_MODE"] = "true";
  if (!gpu_ids.empty() && gpu_ids != "all") result["CUDA_VISIBLE_DEVICES"] = gpu_ids;
  if (distributed_type == "FSDP") {
    result["ACCELERATE_USE_FSDP"] = "true";
    for (const auto& [key, value] : fsdp) result["FSDP_" + upper_case(key)] = value;
  }
  return result;
}

}  // namespace lockstep::launch
