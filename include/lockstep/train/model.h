// The model that a Trainer trains: any torch::nn module.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <functional>
#include <memory>
#include <utility>

#include "lockstep/parallel/call.h"

namespace lockstep::train {

// A handle: a module and how to call it. forward() is not a virtual function in libtorch, so it is
// taken from the type that the handle is made from; a module whose forward() takes something else
// than one tensor, or gives something else, comes with a function, or without any where the program
// calls the module itself. It is called through lockstep::call(), so that Fsdp and
// ActivationCheckpointing work on it; a function that is given has to call it so, too.
class Model {
 public:
  // A model's forward().
  using Forward = std::function<at::Tensor(const at::Tensor& input)>;

  // None.
  Model() = default;
  // What TORCH_MODULE made, as torch::nn::Sequential.
  template <class Contained>
  Model(const torch::nn::ModuleHolder<Contained>& holder)  // NOLINT(google-explicit-constructor)
      : Model(holder.is_empty() ? nullptr : holder.ptr()) {}
  template <std::derived_from<torch::nn::Module> M>
  Model(std::shared_ptr<M> module) : module_(module) {  // NOLINT(google-explicit-constructor)
    if constexpr (requires(const at::Tensor& x) {
                    { module->forward(x) } -> std::convertible_to<at::Tensor>;
                  }) {
      forward_ = [module = std::move(module)](const at::Tensor& x) {
        return parallel::call(module, x);
      };
    }
  }
  // With a function in place of forward().
  Model(std::shared_ptr<torch::nn::Module> module, Forward forward)
      : module_(std::move(module)), forward_(std::move(forward)) {}

  // Whether there is one.
  explicit operator bool() const { return module_ != nullptr; }
  // Which there has to be.
  torch::nn::Module& module() const { return *module_; }
  const std::shared_ptr<torch::nn::Module>& shared() const { return module_; }

  // The model's output. Throws ConfigError where there is no function of one tensor.
  at::Tensor forward(const at::Tensor& input) const;

 private:
  std::shared_ptr<torch::nn::Module> module_;
  Forward forward_;
};

}  // namespace lockstep::train
