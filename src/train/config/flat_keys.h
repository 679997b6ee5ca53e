// Keys that stand at the top of configurations as people have them: those of the transformers
// Trainer, of accelerate, of PyTorch's DDP and FSDP.
#pragma once

#include <yaml-cpp/yaml.h>

#include <functional>
#include <string>
#include <vector>

#include "lockstep/train/config.h"

namespace lockstep::train {

// What a flat key says, as native keys.
struct FlatMeaning {
  struct Value {
    std::string path;
    YAML::Node node;
  };
  std::vector<Value> values = {};
  std::string remark = {};   // to be said once
  std::string problem = {};  // why it cannot be honoured
};

struct FlatKey {
  std::string name;
  std::string meaning;  // for the documentation
  std::function<FlatMeaning(const YAML::Node&)> translate;
};

const std::vector<FlatKey>& flat_keys();
// Null when there is none.
const FlatKey* find_flat_key(const std::string& name);
bool is_flat_key(const std::string& name);

// A key of accelerate's fsdp_config, without its prefix, as native keys.
FlatMeaning translate_fsdp(const std::string& name, const YAML::Node& value);
// The names that translate_fsdp() knows.
std::vector<std::string> fsdp_names();
// Remarks on keys of parallel.fsdp that have no effect here.
void note_fsdp(RunConfig& config);

}  // namespace lockstep::train
