#include "lockstep/parallel/call.h"

#include <cxxabi.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

#include "lockstep/core/error.h"

namespace lockstep::parallel {

namespace detail {
std::atomic<int> attachment_count = 0;
}  // namespace detail

namespace {

struct AttachedLayer {
  CallLayer* layer;
  CallDepth depth;
};

// A module has no place for what is attached to it. Layers detach before their module's memory can
// be reused by another module: the attaching object keeps the module alive, or requires it to
// outlive the attachment.
struct AllAttached {
  std::mutex mutex;
  std::map<const torch::nn::Module*, std::vector<AttachedLayer>> layers;
};
AllAttached& all_attached() {
  static AllAttached* all = new AllAttached;  // modules may be destroyed after static objects
  return *all;
}

std::vector<AttachedLayer> layers_of(const torch::nn::Module& module) {
  auto& [mutex, layers] = all_attached();
  const std::lock_guard lock(mutex);
  const auto found = layers.find(&module);
  return found == layers.end() ? std::vector<AttachedLayer>() : found->second;
}

CallLayer::Body within(const std::vector<AttachedLayer>& layers, size_t index,
                       const CallLayer::Body& body) {
  if (index == layers.size()) return body;
  return [layer = layers[index].layer, inner = within(layers, index + 1, body)](
             const CallLayer::Tensors& inputs) { return layer->call(inputs, inner); };
}

}  // namespace

CallAttachment::CallAttachment(const torch::nn::Module& module, CallLayer& layer, CallDepth depth)
    : module_(&module), layer_(&layer) {
  auto& [mutex, all] = all_attached();
  const std::lock_guard lock(mutex);
  auto& layers = all[module_];
  const auto place = std::ranges::upper_bound(
      layers, depth, {}, [](const AttachedLayer& other) { return other.depth; });
  layers.insert(place, {layer_, depth});
  ++detail::attachment_count;
}

CallAttachment::CallAttachment(CallAttachment&& other) noexcept
    : module_(other.module_), layer_(std::exchange(other.layer_, nullptr)) {}

CallAttachment::~CallAttachment() {
  if (layer_ == nullptr) return;
  auto& [mutex, all] = all_attached();
  const std::lock_guard lock(mutex);
  const auto found = all.find(module_);
  std::erase_if(found->second, [&](const AttachedLayer& other) { return other.layer == layer_; });
  if (found->second.empty()) all.erase(found);
  --detail::attachment_count;
}

namespace detail {

bool has_layers(const torch::nn::Module& module) {
  auto& [mutex, layers] = all_attached();
  const std::lock_guard lock(mutex);
  return layers.contains(&module);
}

Tensors run_layers(const torch::nn::Module& module, const Tensors& inputs,
                   const CallLayer::Body& body) {
  return within(layers_of(module), 0, body)(inputs);
}

bool has_layers_within(const torch::nn::SequentialImpl& sequential) {
  return std::ranges::any_of(
      sequential, [](const torch::nn::AnyModule& module) { return has_layers(*module.ptr()); });
}

at::Tensor forward_chain(torch::nn::SequentialImpl& sequential, at::Tensor x) {
  for (auto& module : sequential) {
    x = run_layers(*module.ptr(), {x}, [&module](const Tensors& inputs) -> Tensors {
      return {module.forward(inputs[0])};
    })[0];
  }
  return x;
}

void refuse_result(const torch::nn::Module& module, std::string_view type) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(std::string(type).c_str(), nullptr, nullptr, &status), &std::free);
  throw ConfigError(fmt::format(
      "[call] forward() of {} returns {}, whose tensors cannot be seen: return tensors, or a "
      "std::tuple, vector or optional of them, where Fsdp or activation checkpointing is attached",
      module.name(), name ? name.get() : std::string(type).c_str()));
}

}  // namespace detail
}  // namespace lockstep::parallel
