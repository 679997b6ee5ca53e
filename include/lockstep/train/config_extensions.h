// Keys that a program with models, data or losses of its own adds to the configuration, so that its
// file is checked as strictly as any other. Needs no torch.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "lockstep/core/compiler.h"

namespace lockstep::train {

// What a key may hold.
using Value = std::variant<bool, int64_t, double, std::string, std::vector<int64_t>,
                           std::vector<double>, std::vector<std::string>>;

// One key. The type of `fallback` is the key's type.
struct KeyDeclaration {
  std::string name = {};
  Value fallback = int64_t{0};  // the value where the file has none
  std::string description = {};
  std::vector<std::string> allowed = {};  // for texts; empty: any
  std::optional<double> least = {};       // for numbers
  std::optional<double> most = {};
  bool required = false;  // the file has to have it
};

// What a program adds. Names that are there already throw ConfigError when a file is loaded.
struct ConfigExtensions {
  // The keys of a kind or a section.
  using Keys = std::vector<KeyDeclaration>;
  std::map<std::string, Keys> models = {};      // model.kind -> its keys below `model`
  std::map<std::string, Keys> datasets = {};    // data.kind -> its keys below `data`
  std::map<std::string, Keys> optimizers = {};  // optimizer.kind -> its keys below `optimizer`
  std::vector<std::string> losses = {};         // further values of training.loss
  std::vector<std::string> metrics = {};        // further values in training.metrics
  std::map<std::string, Keys> sections = {};    // sections of the program's own
};

}  // namespace lockstep::train
