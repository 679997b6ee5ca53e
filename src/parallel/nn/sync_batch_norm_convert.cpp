// convert_sync_batch_norm(): finds every place that holds a layer, checks them all, then replaces
// each layer that nothing else holds and overrides batch_norm() for the others.
#include <fmt/format.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <functional>
#include <map>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/parallel/sync_batch_norm.h"
#include "parallel/lanes/rules.h"
#include "parallel/nn/batch_norm_override.h"

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

struct LayersFound {
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
[[noreturn]] void refuse_layer(fmt::format_string<Args...> text, Args&&... args) {
  throw ConfigError("[convert_sync_batch_norm] " + fmt::format(text, std::forward<Args>(args)...));
}

bool is_torch_batch_norm(const Module& module) {
  return any_dimension(
      [&]<size_t D>() { return dynamic_cast<const TorchBatchNormImpl<D>*>(&module) != nullptr; });
}

// Neither a derived class, whose own behaviour would be lost, nor held by a member variable, which
// would keep the old layer.
bool is_replaceable(const std::shared_ptr<Module>& layer, const Found& found) {
  const long here = 1 + static_cast<long>(found.places.size());  // 1: the key itself
  return !found.places.empty() && layer.use_count() <= here &&
         any_dimension([&]<size_t D>() { return typeid(*layer) == typeid(TorchBatchNormImpl<D>); });
}

// By which batch_norm() knows the layer.
std::vector<at::Tensor> tensors_of(const Module& module) {
  std::vector<at::Tensor> tensors;
  any_dimension([&]<size_t D>() {
    const auto* layer = dynamic_cast<const TorchBatchNormImpl<D>*>(&module);
    if (layer == nullptr) return false;
    for (const auto& tensor : {layer->weight, layer->running_mean}) {
      if (tensor.defined()) tensors.push_back(tensor);
    }
    return true;
  });
  return tensors;
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

void search(Module& module, const std::string& prefix, LayersFound& layers) {
  if (!layers.visited.insert(&module).second) return;
  if (is_synchronous(module)) layers.synchronous.insert(&module);
  std::ptrdiff_t index = 0;
  for (const auto& item : module.named_children()) {
    const std::string name = prefix + item.key();
    if (is_torch_batch_norm(*item.value())) {
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

void refuse_unknowable(const LayersFound& layers) {
  for (const auto& [layer, found] : layers.torch) {
    if (is_replaceable(layer, found) || !tensors_of(*layer).empty()) continue;
    refuse_layer(
        "'{}' has neither weights nor running statistics, and a member variable holds it: nothing "
        "tells its calls from others'. Declare it as lockstep::SyncBatchNorm1d, 2d or 3d, which is "
        "a BatchNorm until it is converted",
        found.name);
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

size_t convert_sync_batch_norm(const std::shared_ptr<Module>& module, const Group& group) {
  if (module == nullptr) refuse_layer("there is no module: construct it first");
  return convert_sync_batch_norm(*module, group);
}

size_t convert_sync_batch_norm(Module& module, const Group& group) {
  group.refuse_python_ranks("SyncBatchNorm");
  refuse_lanes(
      group, "convert_sync_batch_norm",
      "keep BatchNorm, or use GroupNorm or LayerNorm; for a model that runs no lanes, give "
      "a group of its own");
  LayersFound layers;
  if (is_torch_batch_norm(module)) {
    const auto itself = module.weak_from_this().lock();
    if (!itself)
      refuse_layer("the module is a BatchNorm that no shared_ptr holds: construct one that is");
    layers.torch[itself].name = "the module itself";
  } else {
    search(module, "", layers);
  }
  refuse_unknowable(layers);
  const size_t count = layers.torch.size() + layers.synchronous.size();
  if (count == 0) return 0;
  const Group own = group.size() == 1 ? group : group.split(0, group.rank());
  for (const auto& [layer, found] : layers.torch) {
    if (is_replaceable(layer, found)) {
      replace(*layer, found, own);
    } else if (own.size() > 1) {
      override_batch_norm(layer, tensors_of(*layer), own);
    }
  }
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
