#include "lockstep/checkpoint/load_optimizer.h"

#include <c10/util/Type.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/optim/adamw.h>

#include <charconv>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "checkpoint/file_memory.h"
#include "checkpoint/optimizer_fields.h"
#include "checkpoint/part_of.h"
#include "checkpoint/share.h"
#include "checkpoint/stored_view.h"
#include "lockstep/checkpoint/state.h"
#include "lockstep/checkpoint/tensor_files.h"
#include "lockstep/core/error.h"

namespace lockstep::checkpoint {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamState;

// Says how a step is computed, what a schedule began with or what parameters are called, and
// changes no result.
bool changes_nothing(const std::string& option) {
  static const std::set<std::string> kAll = {
      "foreach", "fused",  "capturable",   "differentiable", "initial_lr", "max_lr",
      "min_lr",  "swa_lr", "max_momentum", "base_momentum",  "name"};
  return kAll.contains(option) || option.starts_with("param_names.");
}

// Each once: Python's parameters() has a tied one once, libtorch's as often as it has names.
std::vector<at::Tensor> parameters_of(const torch::optim::OptimizerParamGroup& group) {
  std::vector<at::Tensor> out;
  std::set<const at::TensorImpl*> seen;
  for (const auto& parameter : group.params()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) out.push_back(parameter);
  }
  return out;
}

std::optional<double> real(const Value& value) {
  if (const auto* number = std::get_if<double>(&value)) return *number;
  if (const auto* whole = std::get_if<int64_t>(&value)) return static_cast<double>(*whole);
  return std::nullopt;
}

// "12.exp_avg" is 12 and "exp_avg"; nothing for what does not begin with a number.
std::optional<std::pair<size_t, std::string>> numbered(const std::string& name) {
  size_t number = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  if (error != std::errc() || end == name.data() + name.size() || *end != '.') return {};
  return std::pair(number, std::string(end + 1));
}

// In two steps: compare, then change.
class OptimizerLoader {
 public:
  OptimizerLoader(Optimizer& optimizer, const std::string& path,
                  const LoadOptimizerOptions& options)
      : optimizer_(optimizer), files_(open_tensors(path)), allowed_(options.allow_unexpected) {
    const std::string& prefix = options.prefix;
    for (const auto& group : optimizer.param_groups()) own_.push_back(parameters_of(group));
    for (const auto& [name, value] : files_->values()) {
      if (!name.starts_with(prefix)) continue;
      const std::string own = name.substr(prefix.size());
      if (own.starts_with(kGroups)) groups_of(own.substr(kGroups.size()), value);
      if (own.starts_with(kState)) state_of(own.substr(kState.size()), value);
    }
    const auto add = [&](const std::string& name, const std::string& stored) {
      if (!name.starts_with(prefix)) return;
      const std::string own = name.substr(prefix.size());
      const auto kind = own.starts_with(kGroups) ? kGroups : kState;
      if (!own.starts_with(kind)) return;
      const auto parts = numbered(own.substr(kind.size()));
      if (!parts) return;
      if (kind == kState) {
        tensors_[parts->first][parts->second] = stored;
      } else if (const auto number = number_in(stored)) {  // a rate that is a tensor
        groups_[parts->first].options[parts->second] = *number;
      }
    };
    for (const auto& [name, tensor] : files_->tensors()) add(name, name);
    for (const auto& [name, target] : files_->aliases()) add(name, target);
    if (groups_.empty()) {
      throw CheckpointError(
          fmt::format("[checkpoint] {}: has no '{}param_groups', so there is no state dict of an "
                      "optimizer. Another prefix says where it is",
                      path, prefix));
    }
  }

  void load() {
    compare_groups();
    if (faults_.empty()) compare_options();
    if (faults_.empty()) compare_states();
    if (!faults_.empty()) {
      throw CheckpointError(fmt::format("[checkpoint] {} does not fit the optimizer:\n    {}",
                                        files_->path(), fmt::join(faults_, "\n    ")));
    }
    set_options(optimizer_, options_);
    optimizer_.state().clear();  // as load_state_dict() does it
    for (auto& [parameter, state] : next_) {
      optimizer_.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
    }
  }

 private:
  static constexpr std::string_view kGroups = "param_groups.", kState = "state.";

  struct Group {
    std::map<size_t, size_t> parameters;  // their numbers, by place
    Values options;
  };

  void groups_of(const std::string& name, const Value& value) {
    const auto parts = numbered(name);
    if (!parts) return;
    Group& group = groups_[parts->first];
    constexpr std::string_view kParameters = "params.";
    if (!parts->second.starts_with(kParameters)) {
      group.options[parts->second] = value;
      return;
    }
    const auto place = numbered(parts->second.substr(kParameters.size()) + ".");
    const auto* number = std::get_if<int64_t>(&value);
    if (place && number != nullptr) {
      group.parameters[place->first] = static_cast<size_t>(*number);
    }
  }

  void state_of(const std::string& name, const Value& value) {
    if (const auto parts = numbered(name)) numbers_[parts->first][parts->second] = value;
  }

  void compare_groups() {
    if (own_.size() != groups_.size()) {
      faults_.push_back(
          fmt::format("it has {} groups there, {} here", groups_.size(), own_.size()));
      return;
    }
    std::set<size_t> known;
    for (size_t g = 0; g < own_.size(); ++g) {
      const auto& there = groups_[g].parameters;
      for (const auto& [place, number] : there) known.insert(number);
      if (there.size() == own_[g].size()) continue;
      faults_.push_back(fmt::format("group {} has {} parameters there, {} here", g, there.size(),
                                    own_[g].size()));
    }
    const auto check = [&](size_t number) {
      if (known.contains(number)) return;
      faults_.push_back(fmt::format("the state of parameter {} is of no group", number));
    };
    for (const auto& [number, fields] : tensors_) check(number);
    for (const auto& [number, fields] : numbers_) {
      if (!tensors_.contains(number)) check(number);
    }
  }

  void compare_options() {
    std::map<size_t, std::set<std::string>> used;
    for (const auto& [path, current] : option_values(optimizer_)) {  // "group/0/lr"
      const size_t slash = path.rfind('/');
      const size_t group = std::stoul(path.substr(path.find('/') + 1));
      const std::string name = path.substr(slash + 1);
      std::vector<std::string> wanted = {name};
      if (std::holds_alternative<std::vector<double>>(current)) wanted = {name + ".0", name + ".1"};
      std::vector<double> reals;
      for (const auto& each : wanted) {
        used[group].insert(each);
        const auto found = groups_[group].options.find(each);
        const bool is_flag = std::holds_alternative<bool>(current);
        if (found == groups_[group].options.end() ||
            (is_flag ? !std::holds_alternative<bool>(found->second) : !real(found->second))) {
          faults_.push_back(fmt::format("group {} has no {} there that is a {}", group, each,
                                        is_flag ? "bool" : "number"));
        } else if (is_flag) {
          options_[path] = found->second;
        } else {
          reals.push_back(*real(found->second));
        }
      }
      if (std::holds_alternative<double>(current) && reals.size() == 1) options_[path] = reals[0];
      if (wanted.size() == 2) options_[path] = reals;
    }
    for (const auto& [number, group] : groups_) {
      for (const auto& [name, value] : group.options) {
        if (!used[number].contains(name)) compare_other(number, name, value);
      }
    }
  }

  // An option that libtorch's class does not have.
  void compare_other(size_t group, const std::string& name, const Value& value) {
    const bool* flag = std::get_if<bool>(&value);
    if (changes_nothing(name) || (name == "maximize" && flag != nullptr && !*flag)) return;
    if (matches(name, allowed_)) return;
    if (name == "decoupled_weight_decay" && flag != nullptr) {
      const bool here = dynamic_cast<const torch::optim::AdamW*>(&optimizer_) != nullptr;
      if (*flag == here) return;
      faults_.push_back(fmt::format("group {} is of {} there", group, *flag ? "AdamW" : "Adam"));
      return;
    }
    faults_.push_back(
        fmt::format("group {} has {} there, which this optimizer does not have", group, name));
  }

  void compare_states() {
    for (size_t g = 0; g < groups_.size(); ++g) {
      size_t place = 0;
      for (const auto& [at, number] : groups_[g].parameters) {
        compare_state(g, number, own_[g][place], fmt::format("parameter {} of group {}", place, g));
        ++place;
      }
    }
  }

  void compare_state(size_t group, size_t number, const at::Tensor& parameter,
                     const std::string& where) {
    const auto& stored = tensors_[number];
    const auto& values = numbers_[number];
    if (stored.empty() && values.empty()) {  // it had no gradient yet
      if (needs_first_state(optimizer_)) faults_.push_back(where + " has no state there");
      return;
    }
    auto state = new_state(optimizer_);
    std::set<std::string> used;
    for (const auto& [field, value] : fields_of(*state)) {
      used.insert(field);
      if (const auto* count = std::get_if<int64_t*>(&value)) {
        const auto step = step_of(stored, values, field);
        if (!step) faults_.push_back(fmt::format("{} has no whole {} there", where, field));
        if (step) **count = *step;
        continue;
      }
      const auto found = stored.find(field);
      if (found == stored.end()) {
        if (is_needed(group, field)) {
          faults_.push_back(fmt::format("{} has no {} there", where, field));
        }
        continue;
      }
      const StoredTensor& there = files_->tensors().at(found->second);
      if (at::IntArrayRef(there.sizes) != parameter.sizes() ||
          there.dtype != dtype_of(parameter.scalar_type())) {
        faults_.push_back(fmt::format(
            "{} of {} is {} there, {} here", field, where, type_text(there.dtype, there.sizes),
            type_text(dtype_of(parameter.scalar_type()), parameter.sizes())));
        continue;
      }
      const at::NoGradGuard no_grad;
      at::Tensor& to = **std::get_if<at::Tensor*>(&value);
      to = zeros_beside(parameter);
      const TensorBytes bytes = files_->read(found->second);
      to.copy_(view_of(bytes.view(), there));
    }
    for (const auto& [field, name] : stored) {
      if (!used.contains(field)) faults_.push_back(other_field(where, field));
    }
    for (const auto& [field, value] : values) {
      if (!used.contains(field)) faults_.push_back(other_field(where, field));
    }
    next_.emplace_back(parameter, std::move(state));
  }

  static std::string other_field(const std::string& where, const std::string& field) {
    return fmt::format("{} has {} there, which this optimizer does not have", where, field);
  }

  // Some are only there with the option that uses them; libtorch's step takes what it needs for
  // granted.
  bool is_needed(size_t group, const std::string& field) const {
    const auto option = [&](const char* name) {
      const auto found = options_.find(fmt::format("group/{}/{}", group, name));
      if (found == options_.end()) return false;
      const bool* flag = std::get_if<bool>(&found->second);
      return flag != nullptr ? *flag : real(found->second).value_or(0) != 0;
    };
    if (field == "max_exp_avg_sq") return option("amsgrad");
    if (field == "grad_avg") return option("centered");
    if (field == "momentum_buffer") return option("momentum");
    return true;
  }

  std::optional<double> number_in(const std::string& name) {
    const StoredTensor& stored = files_->tensors().at(name);
    if (elements(stored.sizes) != 1) return std::nullopt;
    const TensorBytes bytes = files_->read(name);
    const at::Tensor one = view_of(bytes.view(), stored);
    return one.is_complex() ? std::nullopt : std::optional(one.to(at::kDouble).item<double>());
  }

  // A number, or a tensor of one.
  std::optional<int64_t> step_of(const std::map<std::string, std::string>& stored,
                                 const Values& values, const std::string& field) {
    std::optional<double> step;
    if (const auto value = values.find(field); value != values.end()) step = real(value->second);
    if (const auto found = stored.find(field); found != stored.end()) {
      step = number_in(found->second);
    }
    constexpr double kMost = 9007199254740992.0;  // 2^53
    if (!step || !(*step >= 0 && *step <= kMost) || *step != std::floor(*step)) return std::nullopt;
    return static_cast<int64_t>(*step);
  }

  Optimizer& optimizer_;
  std::unique_ptr<TensorFiles> files_;
  const std::vector<std::string> allowed_;
  std::vector<std::vector<at::Tensor>> own_;  // by group
  std::map<size_t, Group> groups_;
  std::map<size_t, std::map<std::string, std::string>> tensors_;  // of a parameter: by field
  std::map<size_t, Values> numbers_;
  std::vector<std::string> faults_;
  Values options_;
  std::vector<std::pair<at::Tensor, std::unique_ptr<OptimizerParamState>>> next_;
};

}  // namespace

void load_optimizer(Optimizer& optimizer, const std::string& path,
                    const LoadOptimizerOptions& options) {
  constexpr const char* kWay =
      "Load into torch's Adam, AdamW, SGD, RMSprop or Adagrad over whole parameters, save a "
      "checkpoint with a Checkpointer, and restore that: it fits however parameters are sharded";
  try {
    refuse_unknown(optimizer);
  } catch (const ConfigError&) {
    throw ConfigError(fmt::format("[checkpoint] load_optimizer: {} is not known here. {}",
                                  c10::demangle(typeid(optimizer).name()), kWay));
  }
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      if (part_of(parameter) == nullptr) continue;
      throw ConfigError(fmt::format(
          "[checkpoint] load_optimizer: the optimizer has parts of parameters. {}", kWay));
    }
  }
  OptimizerLoader(optimizer, path, options).load();
}

}  // namespace lockstep::checkpoint
