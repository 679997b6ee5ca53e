// accelerate's fsdp_config as keys of parallel.fsdp.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "core/words.h"
#include "train/config/flat_keys.h"
#include "train/config/value.h"

namespace lockstep::train {
namespace {

constexpr std::array kStrategies = {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD",
                                    "HYBRID_SHARD_ZERO2"};

// Those whose names and values are ours.
constexpr std::array kSame = {"sharding_strategy",
                              "reshard_after_forward",
                              "auto_wrap_policy",
                              "min_num_params",
                              "transformer_layer_cls_to_wrap",
                              "backward_prefetch",
                              "forward_prefetch",
                              "cpu_offload",
                              "offload_folder",
                              "state_dict_type",
                              "use_orig_params",
                              "sync_module_states",
                              "activation_checkpointing"};

bool is_one(const YAML::Node& value, const char* word) {
  return lower_case(value.IsScalar() ? value.Scalar() : "") == word;
}

FlatMeaning as(const std::string& name, const YAML::Node& value) {
  return {.values = {{"parallel.fsdp." + name, value}}};
}

// "Block,Head" as a list.
YAML::Node split(const YAML::Node& value) {
  if (!value.IsScalar()) return value;
  YAML::Node list(YAML::NodeType::Sequence);
  std::string rest = value.Scalar();
  while (!rest.empty()) {
    const size_t comma = std::min(rest.find(','), rest.size());
    list.push_back(rest.substr(0, comma));
    rest.erase(0, comma + 1);
  }
  return list;
}

}  // namespace

std::vector<std::string> fsdp_names() {
  std::vector<std::string> names(kSame.begin(), kSame.end());
  for (const char* other :
       {"offload_params", "transformer_cls_to_wrap", "version", "cpu_ram_efficient_loading",
        "ignored_modules", "activation_checkpointing_offload"}) {
    names.emplace_back(other);
  }
  return names;
}

FlatMeaning translate_fsdp(const std::string& name, const YAML::Node& value) {
  const std::string text = value.IsScalar() ? value.Scalar() : "";
  if (name == "sharding_strategy" && text.size() == 1 && text[0] >= '1' && text[0] <= '5') {
    return as(name, YAML::Node(kStrategies[static_cast<size_t>(text[0] - '1')]));
  }
  // With version 1 accelerate keeps the strategy under this name.
  if (name == "reshard_after_forward" &&
      std::find(kStrategies.begin(), kStrategies.end(), text) != kStrategies.end()) {
    return as("sharding_strategy", value);
  }
  if (name == "offload_params") return as("cpu_offload", value);
  if (name == "transformer_cls_to_wrap" || name == "transformer_layer_cls_to_wrap") {
    return as("transformer_layer_cls_to_wrap", split(value));
  }
  if (name == "version" && (text == "1" || text == "2")) return {};
  if (name == "version") return {.problem = fmt::format("{} is neither 1 nor 2", excerpt(value))};
  if (name == "cpu_ram_efficient_loading") {
    return {.remark = "has no effect: weights are read where they lie"};
  }
  if (name == "ignored_modules" || name == "activation_checkpointing_offload") {
    if (text.empty() || is_one(value, "false")) return {};
    return {.problem = "is not supported"};
  }
  return as(name, value);
}

void note_fsdp(RunConfig& config) {
  if (config.parallel.strategy != "fsdp") return;
  const auto& fsdp = config.parallel.fsdp;
  const auto note = [&](const std::string& name, bool differs, const std::string& what) {
    const auto origin = config.origins.find("parallel.fsdp." + name);
    if (!differs || origin == config.origins.end()) return;
    config.remarks.push_back(fmt::format("{}: {} {}", origin->second, name, what));
  };
  note("state_dict_type", fsdp.state_dict_type != "SHARDED_STATE_DICT",
       "has no effect: each rank writes its part, any number of ranks restores it, and `lockstep "
       "merge` makes one file");
  note("use_orig_params", !fsdp.use_orig_params,
       "has no effect: optimizers see shards under the parameters' names");
  note("sync_module_states", !fsdp.sync_module_states,
       "has no effect: parameters become rank 0's in any case");
  note("cpu_offload", fsdp.cpu_offload && config.parallel.device != "cuda",
       "has no effect on CPUs: parameters lie in the host's memory");
  note("min_num_params", fsdp.min_num_params > 0 && fsdp.auto_wrap_policy == "AUTO",
       "without auto_wrap_policy means SIZE_BASED_WRAP");
}

}  // namespace lockstep::train
