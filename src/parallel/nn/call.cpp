#include "lockstep/parallel/call.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>

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

at::Tensor run_layers_on(const torch::nn::Module& module, const at::Tensor& input,
                         const std::function<at::Tensor(const at::Tensor&)>& forward) {
  const auto first = std::make_shared<std::optional<Outcome>>();
  const auto body = [forward, slot = std::weak_ptr(first)](const Tensors& given) {
    Outcome outcome(given);
    outcome.add_result(forward(given[0]));
    outcome.add_changed();
    Tensors all = outcome.outputs();
    if (const auto call = slot.lock()) call->emplace(std::move(outcome));
    return all;
  };
  const Tensors outputs = run_layers(module, {input}, body);
  (*first)->finish(outputs, {input});
  return (*first)->next();
}

bool is_recomputed(const torch::nn::Module& module) {
  if (!at::GradMode::is_enabled()) return false;
  return std::ranges::any_of(layers_of(module), [](const AttachedLayer& layer) {
    return layer.depth == CallDepth::Recompute;
  });
}

Outcome::Outcome(Tensors given) : given_(std::move(given)) {
  for (const auto& tensor : given_) before_.push_back(state_of(tensor));
}

Outcome::Before Outcome::state_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_inference()) return {};  // those have no version
  const auto node = tensor.grad_fn();
  // Kept, so that no later node has its address.
  return {tensor._version(), {node.get(), [node](const void*) {}}};
}

std::optional<size_t> Outcome::given(const at::Tensor& tensor) const {
  const auto found =
      std::ranges::find_if(given_, [&](const at::Tensor& other) { return other.is_same(tensor); });
  if (found == given_.end()) return std::nullopt;
  return found - given_.begin();
}

// A tensor that comes twice stays one: what changes it in place changes both.
size_t Outcome::output(const at::Tensor& tensor) {
  const auto found = std::ranges::find_if(
      outputs_, [&](const at::Tensor& other) { return other.is_same(tensor); });
  const size_t index = found - outputs_.begin();
  if (found == outputs_.end()) outputs_.push_back(tensor);
  return index;
}

void Outcome::add_result(const at::Tensor& tensor) {
  if (!tensor.defined()) return places_.emplace_back(), void();
  if (!given(tensor)) return places_.push_back({Among::Outputs, output(tensor)});
  // Arguments that are one tensor in this run may be several in the next.
  places_.push_back({Among::Outputs, outputs_.size()});
  outputs_.push_back(tensor);
}

void Outcome::add_written(const at::Tensor& tensor) {
  if (const auto index = given(tensor)) return places_.push_back({Among::Given, *index});
  add_result(tensor);
}

void Outcome::add_changed() {
  for (size_t i = 0; i < given_.size(); ++i) {
    const Before now = state_of(given_[i]);
    if (now.version == before_[i].version) continue;
    // Under no_grad a value was written, which has no gradient.
    const bool in_graph = now.node != before_[i].node || !given_[i].requires_grad();
    changed_.push_back({i, output(in_graph ? given_[i] : given_[i].detach()), in_graph});
  }
}

void Outcome::finish(const Tensors& outputs, const Tensors& inputs) {
  for (const auto& place : places_) {
    tensors_.push_back(place.list == Among::Outputs ? outputs.at(place.index)
                       : place.list == Among::Given ? inputs.at(place.index)
                                                    : at::Tensor());
  }
  for (const auto& item : changed_) {
    at::Tensor input = inputs.at(item.given);
    if (input.is_same(given_[item.given])) continue;
    const at::AutoGradMode grad(at::GradMode::is_enabled() && item.in_graph);
    input.copy_(outputs.at(item.output));
  }
}

bool has_layers_within(const torch::nn::SequentialImpl& sequential) {
  return std::ranges::any_of(
      sequential, [](const torch::nn::AnyModule& module) { return has_layers(*module.ptr()); });
}

at::Tensor forward_chain(torch::nn::SequentialImpl& sequential, at::Tensor x) {
  for (auto& module : sequential) {
    x = run_layers_on(*module.ptr(), x,
                      [&module](const at::Tensor& input) { return module.forward(input); });
  }
  return x;
}

void refuse_result(const torch::nn::Module& module, std::string_view type) {
  throw ConfigError(fmt::format(
      "[call] forward() of {} returns {}, whose tensors cannot be seen: return tensors, or a "
      "std::tuple, vector or optional of them, where Fsdp or activation checkpointing is attached",
      module.name(), c10::demangle(std::string(type).c_str())));
}

void refuse_second_run(const torch::nn::Module& module, std::string_view type) {
  throw ConfigError(fmt::format(
      "[call] forward() of {} takes an object that it may write to ({}), and backward would run it "
      "again on what it wrote, because ActivationCheckpointing is attached: take and return "
      "tensors, or a std::tuple, vector or optional of them, and give what it only reads as const",
      module.name(), c10::demangle(std::string(type).c_str())));
}

void refuse_kept(const torch::nn::Module& module, std::string_view type) {
  throw ConfigError(fmt::format(
      "[call] forward() of {} takes {}, which may have changed or be gone when backward runs it "
      "again, because ActivationCheckpointing is attached: give it tensors, an object that can be "
      "copied and has no virtual functions, or a std::shared_ptr to a const one, and no pointer to "
      "or view of what others own",
      module.name(), c10::demangle(std::string(type).c_str())));
}

void refuse_written(const torch::nn::Module& module, std::string_view type) {
  throw ConfigError(fmt::format(
      "[call] forward() of {} wrote to an argument of type {}, which cannot be assigned: return "
      "what it writes, where Fsdp or activation checkpointing is attached",
      module.name(), c10::demangle(std::string(type).c_str())));
}

void refuse_shared(const torch::nn::Module& module) {
  throw ConfigError(fmt::format(
      "[call] forward() of {} wrote to an argument that it was given twice: give it another "
      "object, or a copy, where Fsdp or activation checkpointing is attached",
      module.name()));
}

}  // namespace detail
}  // namespace lockstep::parallel
