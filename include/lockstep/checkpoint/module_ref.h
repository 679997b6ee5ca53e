// The models that Checkpointer, Ddp, Fsdp and others accept: anything with named parameters and
// buffers.
#pragma once

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/compiler.h"

namespace lockstep::checkpoint {

// Refers to a torch::nn::Module, or to what holds one (std::shared_ptr, a class that TORCH_MODULE
// or libtorch made, as torch::nn::Sequential), or to a torch::jit::Module. It does not keep a
// torch::nn::Module alive: one that no shared_ptr owns has to stay where it is for as long as this
// is used. A torch::jit::Module is itself a handle, which this keeps.
class ModuleRef {
 public:
  // Tensors with their names.
  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

  // Implicit, so that Ddp(net, world) takes each of them.
  ModuleRef(const torch::nn::Module& module);  // NOLINT(google-explicit-constructor)
  // A scripted module.
  ModuleRef(const torch::jit::Module& module)  // NOLINT(google-explicit-constructor)
      : script_(module) {}
  // Both throw ConfigError when there is no module inside.
  template <std::derived_from<torch::nn::Module> M>
  ModuleRef(const std::shared_ptr<M>& module)  // NOLINT(google-explicit-constructor)
      : ModuleRef(checked(module.get())) {
    if (is_owned_) return;  // else its class may have an enable_shared_from_this of its own
    owner_ = module;
    is_owned_ = !owner_.expired();
  }
  // What TORCH_MODULE makes.
  template <class Contained>
  ModuleRef(
      const torch::nn::ModuleHolder<Contained>& holder)  // NOLINT(google-explicit-constructor)
      : ModuleRef(holder.is_empty() ? nullptr : holder.ptr()) {}

  // In the order of registration, a tensor that has two names twice. Undefined ones are left out.
  NamedTensors parameters() const;
  NamedTensors buffers() const;
  // These tensors without names, which takes some ten nanoseconds a tensor.
  std::vector<at::Tensor> tensors() const;

  // Nothing for a torch::jit::Module.
  const torch::nn::Module* module() const { return module_; }
  // Nothing for a torch::nn::Module.
  const std::optional<torch::jit::Module>& script() const { return script_; }
  // Whether a module that a shared_ptr owned has been destroyed; then nothing above may be called.
  bool has_expired() const { return is_owned_ && owner_.expired(); }

 private:
  static const torch::nn::Module& checked(const torch::nn::Module* module);

  const torch::nn::Module* module_ = nullptr;
  bool is_owned_ = false;
  std::weak_ptr<const torch::nn::Module> owner_;
  std::optional<torch::jit::Module> script_;
};

}  // namespace lockstep::checkpoint

namespace lockstep {
using checkpoint::ModuleRef;
}  // namespace lockstep
