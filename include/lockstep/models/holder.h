// Holders of modules that are made from an options struct.
#pragma once

#include <torch/nn/pimpl.h>

#include <memory>

#include "lockstep/core/compiler.h"

namespace lockstep::models {

// A torch::nn::ModuleHolder, as TORCH_MODULE makes them, that also takes designated initialisers:
// Mlp({.sizes = {784, 256, 10}}).
template <class ModuleImpl, class Options>
class Holder : public torch::nn::ModuleHolder<ModuleImpl> {
 public:
  // An empty one from nullptr, one that shares a std::shared_ptr's module, or a new module where it
  // has a default.
  using torch::nn::ModuleHolder<ModuleImpl>::ModuleHolder;
  // What it holds, as torch::nn::Sequential wants to know.
  using Impl = ModuleImpl;

  // A new module.
  explicit Holder(const Options& options)
      : torch::nn::ModuleHolder<ModuleImpl>(std::make_shared<ModuleImpl>(options)) {}
};

}  // namespace lockstep::models
