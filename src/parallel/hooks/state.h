// What hooks keep from pass to pass.
#pragma once

#include <c10/core/TensorImpl.h>

#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "lockstep/parallel/hooks.h"

namespace lockstep::parallel {

// Tensors by name that a pass reads and replaces. The new ones are staged, and replace the old at
// the end of a pass whose averages were finite on all ranks: after an overflow, whose step
// GradScaler skips, they are those from before it.
class HookState {
 public:
  // What the tensor of a name has to be, and the parameter that it belongs to.
  struct Expected {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    at::Device device;
    c10::weak_intrusive_ptr<c10::TensorImpl> parameter;  // another may come to lie at its address
  };
  using Layout = std::map<std::string, Expected>;

  explicit HookState(std::string hook) : hook_(std::move(hook)) {}

  // At the start of each bucket; forgets what an unfinished pass has staged.
  void begin(const Bucket& bucket);
  // Undefined when there is none yet.
  at::Tensor of(const std::string& name) const;
  void stage(const std::string& name, at::Tensor next) { staged_[name] = std::move(next); }
  // Once the bucket's averages are in bucket.flat, for all buckets in order.
  void settle(const Bucket& bucket);
  // After the pass: the tensor is again what it was before it, or `first` if there was none.
  void revert(const std::string& name, const at::Tensor& first);
  // Nothing more of the pass is reverted.
  void end_pass() { replaced_.clear(); }
  void rescale(double factor);

  const Tensors& tensors() const { return tensors_; }
  // What the tensors have to be from now on. A parameter that was there before keeps its own, also
  // under another name, and one that is new has none. What was restored goes by name when the hook
  // sees the parameters of these tensors for the first time. Throws ConfigError, and changes
  // nothing, when those that were restored before the first call are something else.
  void attach(Layout layout);
  // Takes copies. Throws ConfigError, which names the hook and the tensor, when one is not of the
  // layout (as far as it is known). Nothing has changed then. A parameter may have none: there was
  // no pass since it was added.
  void restore(const Tensors& state, std::initializer_list<std::string_view> prefixes);
  // Throws what restore() would throw.
  void check(const Tensors& state, std::initializer_list<std::string_view> prefixes) const;

 private:
  void check_layout(const Tensors& state, const Layout& layout) const;

  std::string hook_;
  Tensors tensors_, staged_;
  Tensors replaced_;   // by the pass that ends; undefined where there was none
  at::Tensor finite_;  // bool: the averages of the pass so far
  Layout layout_;
  bool attached_ = false;
  bool restored_ = false;  // and no pass since
};

// The part of a tensor laid out as bucket.flat that is the i-th gradient's memory.
at::Tensor part_of(const at::Tensor& flat, const Bucket& bucket, size_t i);

// Error feedback: adds each parameter's residual to its gradient, where the state has one.
void add_residuals(const Bucket& bucket, const HookState& residuals);
// Stages gradient - what of it was sent, when add_residuals() left the gradient as it is now.
// `sent` is laid out as bucket.flat.
void stage_residuals(const Bucket& bucket, const at::Tensor& sent, HookState& residuals);
// After a pass: those of `unused` are what they were before it.
void end_pass_of_residuals(const std::vector<std::string>& unused, HookState& residuals);
// An entry of a layout with the parameter's dtype and device.
HookState::Expected expected_for(const at::Tensor& parameter, std::vector<int64_t> sizes);
// Of gradients that all have one.
HookState::Layout residual_layout(const Tensors& parameters);

// Throws ConfigError when a parameter's gradients go through a hook that leaves ranks with
// gradients of their own. `address` begins the message.
void refuse_local_gradients(const std::vector<at::Tensor>& parameters, std::string_view address);

// Throws the ConfigError of a state that does not fit.
[[noreturn]] void refuse_state(std::string_view hook, const std::string& why);

// The number in state[name]. Throws ConfigError when it is not there, or no count.
int64_t number_in(std::string_view hook, const Tensors& state, const std::string& name);

}  // namespace lockstep::parallel
