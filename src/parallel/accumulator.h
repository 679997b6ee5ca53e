// Hooks on the autograd node that adds into a parameter's gradient.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

#include "lockstep/parallel/comm_hook.h"

namespace lockstep::parallel {

// Who is told about gradients. Called within backward(), on its thread.
class GradientListener {
 public:
  virtual ~GradientListener() = default;
  // A gradient (defined) is about to be added to the parameter's, after the user's hooks saw it.
  // Returns what is left to be added: `gradient`, or an undefined tensor when the listener did it
  // itself.
  virtual at::Tensor arriving(size_t parameter, const at::Tensor& gradient) = 0;
  // It was added, and the user's post-accumulate hooks ran.
  virtual void arrived(size_t parameter) = 0;
  // What the gradients go through, if anything.
  virtual std::shared_ptr<CommHook> hook() const { return nullptr; }
};

// The hook that the parameter's gradients go through, if it is attached to a Ddp that has one.
std::shared_ptr<CommHook> hook_of(const at::Tensor& parameter);

// Tells the listener about one parameter, until it is destroyed.
class Accumulator {
 public:
  Accumulator(const at::Tensor& parameter, size_t index, GradientListener& listener);
  ~Accumulator();
  Accumulator(Accumulator&&) = default;
  Accumulator& operator=(Accumulator&&) = delete;

  // False once the parameter was converted (another dtype or device), which gives it a new node
  // without our hooks.
  bool is_attached() const;

 private:
  // shared_ptr in libtorch 2.11, intrusive_ptr in 2.15. The parameter itself holds it weakly.
  using Node = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  at::Tensor parameter_;
  Node node_;
  const torch::autograd::FunctionPreHook* pre_hook_;
  uintptr_t post_hook_;
};

}  // namespace lockstep::parallel
