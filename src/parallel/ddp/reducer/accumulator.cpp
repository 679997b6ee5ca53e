#include "parallel/ddp/reducer/accumulator.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <vector>

namespace lockstep::parallel {
namespace {

using torch::autograd::variable_list;
// shared_ptr in libtorch 2.11, intrusive_ptr in 2.15.
using NodePtr =
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

std::shared_ptr<torch::autograd::hooks_list>& hooks_of(const at::Tensor& tensor) {
  return torch::autograd::impl::materialize_autograd_meta(tensor)->cpp_hooks_list_;
}

// `set` has a weak pointer as its second argument.
template <class Weak>
void forget_accumulator(void (*set)(const at::Tensor&, Weak), const at::Tensor& parameter) {
  set(parameter, Weak(NodePtr()));
}

// set_data() leaves a parameter the node for its old sizes, as long as a graph has that.
NodePtr accumulator_of(const at::Tensor& parameter) {
  const auto node = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (node && !node->input_metadata(0).is_same_shape(parameter))
    forget_accumulator(torch::autograd::impl::set_grad_accumulator, parameter);
  return torch::autograd::impl::grad_accumulator(parameter);
}

}  // namespace

// What the hooks of one parameter share. Without a listener they do nothing, and the next
// Accumulator takes over the link: a slot of the tensor's hooks can be emptied but, for the sake of
// the user's behind it, not removed.
struct Accumulator::Link : std::enable_shared_from_this<Accumulator::Link> {
  struct Hooked {
    NodePtr node;  // the parameter itself holds it weakly
    const torch::autograd::FunctionPreHook* pre_hook;
    uintptr_t post_hook;
  };
  class PreHook;
  class PostHook;
  struct TensorHook;

  size_t index = 0;
  GradientListener* listener = nullptr;
  std::vector<Hooked> nodes;  // the one in use last

  void attach(NodePtr node);
  void detach();
};

class Accumulator::Link::PreHook : public torch::autograd::FunctionPreHook {
 public:
  explicit PreHook(std::shared_ptr<Link> link) : link_(std::move(link)) {}

  variable_list operator()(const variable_list& gradients) override {
    if (link_->listener == nullptr || !gradients[0].defined()) return gradients;
    return {link_->listener->arriving(link_->index, gradients[0])};
  }

 private:
  std::shared_ptr<Link> link_;
};

class Accumulator::Link::PostHook : public torch::autograd::FunctionPostHook {
 public:
  explicit PostHook(std::shared_ptr<Link> link) : link_(std::move(link)) {}

  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    if (link_->listener != nullptr) link_->listener->arrived(link_->index);
    return outputs;
  }

 private:
  std::shared_ptr<Link> link_;
};

struct Accumulator::Link::TensorHook {
  std::shared_ptr<Link> link;

  at::TensorBase operator()(const at::TensorBase&) const {
    if (link->listener != nullptr) {
      auto node = torch::autograd::get_current_node();
      if (dynamic_cast<torch::autograd::AccumulateGrad*>(node.get())) link->attach(std::move(node));
    }
    return {};
  }
};

void Accumulator::Link::attach(NodePtr node) {
  if (!nodes.empty() && nodes.back().node == node) return;
  const auto known = std::ranges::find(nodes, node, &Hooked::node);
  if (known != nodes.end()) {
    std::iter_swap(known, nodes.end() - 1);
    return;
  }
  // Only a graph that was built before still needs an older node.
  std::erase_if(nodes, [](const Hooked& hooked) { return hooked.node.use_count() == 1; });
  auto pre_hook = std::make_unique<PreHook>(shared_from_this());
  const auto* address = pre_hook.get();
  node->add_pre_hook(std::move(pre_hook));
  const auto post_hook = node->add_post_hook(std::make_unique<PostHook>(shared_from_this()));
  nodes.push_back({std::move(node), address, post_hook});
}

void Accumulator::Link::detach() {
  listener = nullptr;
  for (auto& [node, pre_hook, post_hook] : nodes) {
    std::erase_if(node->pre_hooks(), [&](const auto& hook) { return hook.get() == pre_hook; });
    node->del_post_hook(post_hook);
  }
  nodes.clear();
}

std::shared_ptr<CommHook> hook_of(const at::Tensor& parameter) {
  const auto* listener = Accumulator::listener_of(parameter);
  return listener != nullptr ? listener->hook() : nullptr;
}

Accumulator::Accumulator(const at::Tensor& parameter, size_t index, GradientListener& listener)
    : parameter_(parameter) {
  // register_hook() refuses a tensor that is frozen.
  if (!hooks_of(parameter)) torch::autograd::impl::create_cpp_hook(parameter);
  auto& hooks = *hooks_of(parameter);
  for (const auto& hook : hooks) {
    const auto* ours = hook.target<Link::TensorHook>();
    if (ours != nullptr && ours->link->listener == nullptr) link_ = ours->link;
  }
  if (!link_) {
    link_ = std::make_shared<Link>();
    hooks.emplace_back(Link::TensorHook{link_});
  }
  if (parameter.requires_grad()) link_->attach(accumulator_of(parameter));
  link_->index = index;
  link_->listener = &listener;
}

Accumulator::~Accumulator() {
  if (link_) link_->detach();
}

const Accumulator::Link* Accumulator::link_of(const at::Tensor& parameter) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(parameter);
  if (meta == nullptr || !meta->cpp_hooks_list_) return nullptr;
  for (const auto& hook : *meta->cpp_hooks_list_) {
    const auto* ours = hook.target<Link::TensorHook>();
    if (ours != nullptr && ours->link->listener != nullptr) return ours->link.get();
  }
  return nullptr;
}

GradientListener* Accumulator::listener_of(const at::Tensor& parameter) {
  const Link* link = link_of(parameter);
  return link != nullptr ? link->listener : nullptr;
}

std::string Accumulator::place_of(const at::Tensor& parameter) {
  const Link* link = link_of(parameter);
  if (link == nullptr) return {};
  return fmt::format("parameter {} of Ddp {}", link->index, link->listener->caller());
}

}  // namespace lockstep::parallel
