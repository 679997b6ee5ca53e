// Hooks on what adds into a parameter's gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "lockstep/parallel/comm_hook.h"

namespace lockstep::parallel {

// Receives the gradients. Called within backward(), on its thread.
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
  // Which of its group's it is, the same on all ranks.
  virtual uint32_t caller() const { return 0; }
};

// The hook that the parameter's gradients go through, if it is attached to a Ddp that has one.
std::shared_ptr<CommHook> hook_of(const at::Tensor& parameter);

// Tells the listener about one parameter, until it is destroyed. A parameter that is frozen is
// watched, too: the listener is called when it was unfrozen and gets a gradient.
//
// The hooks have to be on the autograd node that accumulates, to run after the user's. But
// torch::load() and module.to() give a parameter a new node. So a hook on the tensor, which stays,
// adds a hook to the node that is running. torch::autograd::grad() runs that hook but no node.
class Accumulator {
 public:
  Accumulator(const at::Tensor& parameter, size_t index, GradientListener& listener);
  ~Accumulator();
  Accumulator(Accumulator&&) = default;
  Accumulator& operator=(Accumulator&&) = delete;

  // The listener of the Accumulator that is attached to the parameter, if there is one.
  static GradientListener* listener_of(const at::Tensor& parameter);
  // "parameter 3 of Ddp 1", the same on all ranks that attached in one way; empty when there is
  // none.
  static std::string place_of(const at::Tensor& parameter);

 private:
  struct Link;
  static const Link* link_of(const at::Tensor& parameter);

  at::Tensor parameter_;
  std::shared_ptr<Link> link_;
};

}  // namespace lockstep::parallel
