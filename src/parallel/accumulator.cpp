#include "parallel/accumulator.h"

#include <torch/csrc/autograd/function.h>

#include <algorithm>

namespace lockstep::parallel {
namespace {

using torch::autograd::variable_list;

class PreHook : public torch::autograd::FunctionPreHook {
 public:
  PreHook(size_t index, GradientListener& listener) : index_(index), listener_(listener) {}

  variable_list operator()(const variable_list& gradients) override {
    if (!gradients[0].defined()) return gradients;
    return {listener_.arriving(index_, gradients[0])};
  }

  GradientListener& listener() const { return listener_; }

 private:
  size_t index_;
  GradientListener& listener_;
};

class PostHook : public torch::autograd::FunctionPostHook {
 public:
  PostHook(size_t index, GradientListener& listener) : index_(index), listener_(listener) {}

  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    listener_.arrived(index_);
    return outputs;
  }

 private:
  size_t index_;
  GradientListener& listener_;
};

}  // namespace

std::shared_ptr<CommHook> hook_of(const at::Tensor& parameter) {
  const auto node = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (!node) return nullptr;
  for (const auto& hook : node->pre_hooks()) {
    const auto* ours = dynamic_cast<const PreHook*>(hook.get());
    if (ours != nullptr && ours->listener().hook()) return ours->listener().hook();
  }
  return nullptr;
}

Accumulator::Accumulator(const at::Tensor& parameter, size_t index, GradientListener& listener)
    : parameter_(parameter), node_(torch::autograd::impl::grad_accumulator(parameter)) {
  auto pre_hook = std::make_unique<PreHook>(index, listener);
  pre_hook_ = pre_hook.get();
  node_->add_pre_hook(std::move(pre_hook));
  post_hook_ = node_->add_post_hook(std::make_unique<PostHook>(index, listener));
}

Accumulator::~Accumulator() {
  if (!node_) return;
  auto& hooks = node_->pre_hooks();
  std::erase_if(hooks, [this](const auto& hook) { return hook.get() == pre_hook_; });
  node_->del_post_hook(post_hook_);
}

bool Accumulator::is_attached() const {
  return torch::autograd::impl::try_get_grad_accumulator(parameter_) == node_;
}

}  // namespace lockstep::parallel
