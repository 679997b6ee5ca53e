#include "parallel/fsdp/plan_units.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/adaptive.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>
#include <torch/nn/modules/transformer.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>

#include <algorithm>
#include <map>
#include <set>

#include "lockstep/core/error.h"

namespace lockstep::parallel {
namespace {

using torch::nn::Module;

// A module of the model, and where it is.
struct ModuleNode {
  std::string name;
  const Module* module;
  std::shared_ptr<Module> owner;
  size_t parent;  // the root is its own
};

// A module that is registered in several places is in each of them.
void add_child_modules(std::vector<ModuleNode>& nodes, size_t parent) {
  for (const auto& child : nodes[parent].module->named_children()) {
    const std::string& prefix = nodes[parent].name;
    nodes.push_back({prefix.empty() ? child.key() : prefix + "." + child.key(), child.value().get(),
                     child.value(), parent});
    add_child_modules(nodes, nodes.size() - 1);
  }
}

std::vector<ModuleNode> module_tree_of(const Module& module) {
  std::vector<ModuleNode> nodes{{"", &module, nullptr, 0}};
  nodes.front().owner = std::const_pointer_cast<Module>(module.weak_from_this().lock());
  add_child_modules(nodes, 0);
  return nodes;
}

// Which modules register a parameter themselves, by parameter.
std::vector<std::vector<size_t>> module_users_of(const std::vector<ModuleNode>& nodes,
                                                 const Model& model) {
  std::map<const void*, size_t> numbers;
  for (size_t i = 0; i < model.parameters.size(); ++i) {
    numbers[model.parameters[i].tensor.unsafeGetTensorImpl()] = i;
  }
  std::vector<std::vector<size_t>> users(model.parameters.size());
  for (size_t node = 0; node < nodes.size(); ++node) {
    for (const auto& tensor : nodes[node].module->parameters(/*recurse=*/false)) {
      const auto found = numbers.find(tensor.unsafeGetTensorImpl());
      if (found != numbers.end()) users[found->second].push_back(node);
    }
  }
  return users;
}

bool is_within(const std::vector<ModuleNode>& nodes, size_t inner, size_t outer) {
  const Module* module = nodes[outer].module;
  while (nodes[inner].module != module && inner != 0) inner = nodes[inner].parent;
  return nodes[inner].module == module;
}

// Whether it is in a module of libtorch whose forward() runs its layers without lockstep::call().
bool is_in_a_closed_module(const std::vector<ModuleNode>& nodes, size_t node) {
  while (node != 0) {
    node = nodes[node].parent;
    const Module& outer = *nodes[node].module;
    if (outer.as<torch::nn::MultiheadAttentionImpl>() != nullptr ||
        outer.as<torch::nn::TransformerImpl>() != nullptr ||
        outer.as<torch::nn::TransformerEncoderImpl>() != nullptr ||
        outer.as<torch::nn::TransformerDecoderImpl>() != nullptr ||
        outer.as<torch::nn::TransformerEncoderLayerImpl>() != nullptr ||
        outer.as<torch::nn::TransformerDecoderLayerImpl>() != nullptr ||
        outer.as<torch::nn::AdaptiveLogSoftmaxWithLossImpl>() != nullptr) {
      return true;
    }
  }
  return false;
}

// Nobody can call it, because it has no forward().
bool is_container(const Module& module) {
  const std::type_info& type = typeid(module);  // a class derived from one may have a forward()
  return type == typeid(torch::nn::ModuleListImpl) || type == typeid(torch::nn::ModuleDictImpl) ||
         type == typeid(torch::nn::ParameterListImpl) ||
         type == typeid(torch::nn::ParameterDictImpl);
}

// The innermost modules that are large enough, as long as their units take none of another's.
void add_by_size(const std::vector<ModuleNode>& nodes,
                 const std::vector<std::vector<size_t>>& users, const Model& model, int64_t least,
                 std::set<const Module*>& is_unit) {
  // Children come after their parents.
  for (size_t node = nodes.size(); node-- > 1;) {
    const Module* module = nodes[node].module;
    if (is_unit.contains(module) || is_container(*module)) continue;
    if (is_in_a_closed_module(nodes, node)) continue;
    int64_t numel = 0;
    for (size_t i = 0; i < users.size(); ++i) {
      const auto is_ours = [&](size_t user) {
        while (nodes[user].module != module && user != 0 && !is_unit.contains(nodes[user].module)) {
          user = nodes[user].parent;
        }
        return nodes[user].module == module;
      };
      if (!users[i].empty() && std::ranges::all_of(users[i], is_ours)) {
        numel += model.parameters[i].tensor.numel();
      }
    }
    if (numel >= least) is_unit.insert(module);
  }
}

}  // namespace

std::vector<std::shared_ptr<Module>> units_of(const Module& module,
                                              const std::vector<std::string>& types) {
  std::vector<std::shared_ptr<Module>> found;
  std::set<std::string> met, there;
  const auto short_name = [](std::string name) {
    const size_t scope = name.rfind("::");
    if (scope != std::string::npos) name.erase(0, scope + 2);
    if (name.ends_with("Impl")) name.resize(name.size() - 4);
    return name;
  };
  for (const auto& each : module.modules(/*include_self=*/false)) {
    const std::string& name = each->name();
    there.insert(short_name(name));
    for (const auto& type : types) {
      if (type != name && short_name(type) != short_name(name)) continue;
      if (type.find("::") != std::string::npos && type != name && type + "Impl" != name) continue;
      met.insert(type);
      found.push_back(each);
      break;
    }
  }
  for (const auto& type : types) {
    if (met.contains(type)) continue;
    throw ConfigError(fmt::format("[fsdp] no module of type '{}' for a unit; there are {}", type,
                                  fmt::join(there, ", ")));
  }
  return found;
}

std::vector<PlannedUnit> plan_units(const ModuleRef& ref, const Model& model,
                                    const FsdpOptions& options) {
  if (ref.module() == nullptr) {
    throw ConfigError(
        "[fsdp] a torch::jit::Module has no layers that lockstep::call() could run one by one: use "
        "Ddp, with ZeroOptimizer, or a torch::nn::Module");
  }
  const auto nodes = module_tree_of(*ref.module());
  const auto users = module_users_of(nodes, model);
  std::set<const Module*> is_unit{ref.module()};
  for (const auto& unit : options.units) {
    const auto found = std::ranges::find(nodes, unit.get(), &ModuleNode::module);
    if (unit == nullptr || found == nodes.end()) {
      throw ConfigError(
          fmt::format("[fsdp] FsdpOptions::units has a module ({}) that is not part of the model",
                      unit ? unit->name() : "null"));
    }
    if (is_container(*unit)) {
      throw ConfigError(
          fmt::format("[fsdp] FsdpOptions::units has '{}', a {}, which has no forward() that "
                      "lockstep::call() could run: name the modules in it, or the one around it",
                      found->name, unit->name()));
    }
    is_unit.insert(unit.get());
  }
  if (options.min_num_params > 0) {
    add_by_size(nodes, users, model, options.min_num_params, is_unit);
  }
  std::vector<PlannedUnit> units;
  std::map<const Module*, size_t> unit_at;
  for (const auto& [name, module, owner, parent] : nodes) {
    if (!is_unit.contains(module) || !unit_at.try_emplace(module, units.size()).second) continue;
    units.push_back({name, module, owner, {}});
  }
  for (size_t i = 0; i < users.size(); ++i) {
    size_t place = users[i].empty() ? 0 : users[i].front();
    // Up to what is around all of its users, and is a unit.
    while (place != 0 && (!is_unit.contains(nodes[place].module) ||
                          !std::ranges::all_of(users[i], [&](size_t user) {
                            return is_within(nodes, user, place);
                          }))) {
      place = nodes[place].parent;
    }
    units[unit_at.at(nodes[place].module)].parameters.push_back(i);
  }
  return units;
}

}  // namespace lockstep::parallel
