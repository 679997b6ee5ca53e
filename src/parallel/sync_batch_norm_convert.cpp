// convert_sync_batch_norm(): finds every place that holds a layer, checks them all, then replaces.
#include <fmt/format.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <functional>
#include <map>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/parallel/sync_batch_norm.h"

namespace lockstep::parallel {
namespace {

using torch::nn::AnyModule;
using torch::nn::Module;

using Put = std::function<void(const std::shared_ptr<Module>&, const AnyModule&)>;

// A torch layer, and what puts another one into each place that holds it.
struct Found {
  std::string name;  // the first
  std::vector<Put> places;
};

struct Layers {
  std::map<std::shared_ptr<Module>, Found> torch;
  std::set<Module*> synchronous;
  std::set<Module*> visited;  // a module may be registered under several names
};

// Calls use.operator()<D>() until one of them returns true.
template <typename Use>
bool any_dimension(Use use) {
  return use.template operator()<1>() || use.template operator()<2>() ||
         use.template operator()<3>();
}

template <typename... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> text, Args&&... args) {
  throw ConfigError("[convert_sync_batch_norm] " + fmt::format(text, std::forward<Args>(args)...));
}

bool is_torch_batch_norm(const Module& module, const std::string& name) {
  return any_dimension([&]<size_t D>() {
    if (dynamic_cast<const TorchBatchNormImpl<D>*>(&module) == nullptr) return false;
    if (typeid(module) != typeid(TorchBatchNormImpl<D>)) {
      refuse(
          "'{}' is of a class derived from BatchNorm{}d, whose own behaviour would be lost: "
          "derive it from lockstep::parallel::SyncBatchNorm{}dImpl",
          name, D, D);
    }
    return true;
  });
}

bool is_synchronous(const Module& module) {
  return any_dimension(
      [&]<size_t D>() { return dynamic_cast<const SyncBatchNormImpl<D>*>(&module) != nullptr; });
}

// The containers keep a list of their own beside the registered children.
void note_container(Module& parent, std::ptrdiff_t index, const std::string& key, Found& found) {
  if (auto* sequential = dynamic_cast<torch::nn::SequentialImpl*>(&parent)) {
    found.places.emplace_back(
        [=](const auto&, const AnyModule& layer) { *(sequential->begin() + index) = layer; });
  } else if (auto* list = dynamic_cast<torch::nn::ModuleListImpl*>(&parent)) {
    found.places.emplace_back(
        [=](const auto& layer, const AnyModule&) { *(list->begin() + index) = layer; });
  } else if (auto* dict = dynamic_cast<torch::nn::ModuleDictImpl*>(&parent)) {
    found.places.emplace_back([=](const auto& layer, const AnyModule&) {
      for (auto& item : *dict) {
        if (item.key() == key) item.value() = layer;
      }
    });
  }
}

void search(Module& module, const std::string& prefix, Layers& layers) {
  if (!layers.visited.insert(&module).second) return;
  if (is_synchronous(module)) layers.synchronous.insert(&module);
  std::ptrdiff_t index = 0;
  for (const auto& item : module.named_children()) {
    const std::string name = prefix + item.key();
    if (is_torch_batch_norm(*item.value(), name)) {
      Found& found = layers.torch[item.value()];
      if (found.places.empty()) found.name = name;
      found.places.emplace_back([&module, key = item.key()](const auto& layer, const AnyModule&) {
        module.replace_module(key, layer);
      });
      note_container(module, index, item.key(), found);
    } else {
      search(*item.value(), name + ".", layers);
    }
    ++index;
  }
}

void refuse_handles_elsewhere(const Layers& layers) {
  for (const auto& [layer, found] : layers.torch) {
    const long here = 1 + static_cast<long>(found.places.size());  // 1: the key itself
    if (layer.use_count() == here) continue;
    refuse(
        "'{}' has {} more handle(s), as of a member variable, which would go on without "
        "synchronising because C++ binds forward() at compile time: declare it as "
        "lockstep::SyncBatchNorm1d, 2d or 3d, which is a BatchNorm until it is converted",
        found.name, layer.use_count() - here);
  }
}

void replace(const Module& layer, const Found& found, const Group& group) {
  any_dimension([&]<size_t D>() {
    const auto* old = dynamic_cast<const TorchBatchNormImpl<D>*>(&layer);
    if (old == nullptr) return false;
    const auto fresh = std::make_shared<SyncBatchNormImpl<D>>(*old, group);
    for (const Put& put : found.places) put(fresh, AnyModule(fresh));
    return true;
  });
}

}  // namespace

size_t convert_sync_batch_norm(Module& module, const Group& group) {
  if (is_torch_batch_norm(module, "the module itself")) {
    refuse(
        "the module is a BatchNorm itself, which cannot become another class where it is: "
        "construct a lockstep::SyncBatchNorm from it");
  }
  Layers layers;
  search(module, "", layers);
  refuse_handles_elsewhere(layers);
  const size_t count = layers.torch.size() + layers.synchronous.size();
  if (count == 0) return 0;
  const Group own = group.size() == 1 ? group : group.split(0, group.rank());
  for (const auto& [layer, found] : layers.torch) replace(*layer, found, own);
  for (Module* layer : layers.synchronous) {
    any_dimension([&]<size_t D>() {
      auto* synchronous = dynamic_cast<SyncBatchNormImpl<D>*>(layer);
      if (synchronous != nullptr) synchronous->set_group(own);
      return synchronous != nullptr;
    });
  }
  return count;
}

}  // namespace lockstep::parallel
