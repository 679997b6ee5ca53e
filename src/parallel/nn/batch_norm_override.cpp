#include "parallel/nn/batch_norm_override.h"

#include <ATen/ops/batch_norm_native.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <unordered_map>

namespace lockstep::parallel {
namespace {

struct Layer {
  std::weak_ptr<torch::nn::Module> module;
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;  // another may come to lie at its address
  Group group;
  std::weak_ptr<JoinGate> gate = {};
};

struct Overridden {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, Layer> by_tensor;
  std::vector<std::unique_ptr<torch::Library>> kernels;
};

// Never destroyed: the dispatcher's own end may come before.
Overridden& layers() {
  static auto* all = new Overridden();
  return *all;
}

// The layer that has the tensor, if it is in training.
std::optional<Layer> layer_of(const std::optional<at::Tensor>& tensor) {
  if (!tensor || !tensor->defined()) return std::nullopt;
  auto& [mutex, by_tensor, kernels] = layers();
  const std::lock_guard lock(mutex);
  const auto found = by_tensor.find(tensor->unsafeGetTensorImpl());
  if (found == by_tensor.end()) return std::nullopt;
  const auto module = found->second.module.lock();
  if (!module || found->second.tensor.expired()) {
    by_tensor.erase(found);
    return std::nullopt;
  }
  return module->is_training() ? std::optional(found->second) : std::nullopt;
}

at::Tensor batch_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias,
                      const std::optional<at::Tensor>& running_mean,
                      const std::optional<at::Tensor>& running_var, bool training, double momentum,
                      double eps, bool cudnn_enabled) {
  if (training) {
    auto layer = layer_of(weight);
    if (!layer) layer = layer_of(running_mean);
    if (layer) {
      if (const auto gate = layer->gate.lock()) gate->begin_forward();
      const auto tensor = [](const std::optional<at::Tensor>& given) {
        return given.value_or(at::Tensor());
      };
      return synchronous_batch_norm(input, tensor(weight), tensor(bias), tensor(running_mean),
                                    tensor(running_var), momentum, eps, layer->group);
    }
  }
  return at::native::batch_norm(input, weight, bias, running_mean, running_var, training, momentum,
                                eps, cudnn_enabled);
}

}  // namespace

void override_batch_norm(const std::shared_ptr<torch::nn::Module>& layer,
                         const std::vector<at::Tensor>& tensors, const Group& group) {
  auto& [mutex, by_tensor, kernels] = layers();
  const std::lock_guard lock(mutex);
  if (kernels.empty()) {
    // The backends' keys are for InferenceMode, which skips autograd's.
    for (const auto key : {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA,
                           c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
      kernels.push_back(std::make_unique<torch::Library>(
          torch::Library::IMPL, "aten", key, __FILE__, static_cast<uint32_t>(__LINE__)));
      kernels.back()->impl("batch_norm", TORCH_FN(batch_norm));
    }
  }
  std::erase_if(by_tensor, [](const auto& item) { return item.second.module.expired(); });
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) continue;
    by_tensor.insert_or_assign(
        tensor.unsafeGetTensorImpl(),
        Layer{layer, c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()), group});
  }
}

bool gate_batch_norm(const torch::nn::Module& layer, const std::shared_ptr<JoinGate>& gate) {
  auto& [mutex, by_tensor, kernels] = layers();
  const std::lock_guard lock(mutex);
  bool is_overridden = false;
  for (auto& [tensor, entry] : by_tensor) {
    if (entry.module.lock().get() != &layer || entry.group.size() == 1) continue;
    entry.gate = gate;
    is_overridden = true;
  }
  return is_overridden;
}

int batch_norm_ranks(const torch::nn::Module& layer) {
  auto& [mutex, by_tensor, kernels] = layers();
  const std::lock_guard lock(mutex);
  const auto found = std::ranges::find_if(
      by_tensor, [&](const auto& item) { return item.second.module.lock().get() == &layer; });
  return found == by_tensor.end() ? 1 : found->second.group.size();
}

}  // namespace lockstep::parallel
