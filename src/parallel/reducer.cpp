#include "parallel/reducer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"

namespace lockstep::parallel {
namespace {

// Gradients arrive roughly in the reverse of the order in which layers were registered.
std::vector<size_t> reverse_registration(size_t count) {
  std::vector<size_t> order(count);
  std::iota(order.rbegin(), order.rend(), size_t{0});
  return order;
}

}  // namespace

struct Reducer::Pass {
  std::weak_ptr<Reducer> reducer;

  ~Pass() {
    const auto owner = reducer.lock();
    if (owner && owner->pass_ == this) owner->pass_ = nullptr;
  }
};

Reducer::Reducer(const Group& group, std::vector<Named> parameters, const DdpOptions& options,
                 Packed& buffers, std::shared_ptr<const int> holds)
    : group_(group),
      parameters_(std::move(parameters)),
      options_(options),
      buckets_(group, parameters_,
               assign_buckets(parameters_, reverse_registration(parameters_.size()), options)),
      buffers_(buffers),
      holds_(std::move(holds)),
      held_(parameters_.size()),
      steps_(parameters_.size()) {}

at::Tensor Reducer::arriving(size_t parameter, const at::Tensor& gradient) {
  const Named& item = parameters_[parameter];
  if (gradient.layout() != at::kStrided) {
    throw ConfigError(fmt::format(
        "[ddp] the gradient of parameter '{}' on rank {} is sparse: Ddp averages dense ones only, "
        "so build the layer with sparse = false",
        item.name, group_.rank()));
  }
  if (*holds_ == 0) {
    if (pass_ == nullptr) begin();
    if (steps_[parameter] != Step::Absent) {
      throw ConfigError(fmt::format(
          "[ddp] parameter '{}' on rank {} received a second gradient within one backward(), when "
          "its first may be on its way to the other ranks: checkpoint each layer once, or run this "
          "backward() under hold() and a last one outside",
          item.name, group_.rank()));
    }
    steps_[parameter] = Step::Arriving;
  } else {
    held_[parameter] = true;
  }
  // The node adds, with create_graph it records history, and it runs the user's post-accumulate
  // hook (once or not at all, as the libtorch is, when given nothing to add). arrived() then takes
  // the values.
  if (item.tensor.grad().defined() || at::GradMode::is_enabled() ||
      torch::autograd::impl::post_acc_grad_hooks(item.tensor)) {
    return gradient;
  }
  // One pass over the gradient: no memory to clear, nothing to add to.
  const at::Tensor& view = buckets_.view(parameter);
  view.copy_(gradient);
  item.tensor.mutable_grad() = view;
  return {};
}

void Reducer::arrived(size_t parameter) {
  if (pass_ == nullptr || steps_[parameter] != Step::Arriving) return;
  const at::Tensor& tensor = parameters_[parameter].tensor;
  // A post-accumulate hook that took the gradient away leaves a parameter unreached.
  if (!tensor.grad().defined()) {
    steps_[parameter] = Step::Absent;
    return;
  }
  buckets_.adopt(tensor, parameter);
  steps_[parameter] = Step::Ready;
  order_.push_back(parameter);
  --waiting_[buckets_.bucket_of(parameter)];
  if (launched_ < buckets_.size() && waiting_[launched_] == 0) {
    while (launched_ < buckets_.size() && waiting_[launched_] == 0) launch(launched_);
  } else {
    drive();
  }
}

void Reducer::begin() {
  // What a backward that threw left in flight still writes to the buckets.
  for (auto& work : works_) work.wait();
  works_.clear();
  completed_ = launched_ = 0;
  std::fill(steps_.begin(), steps_.end(), Step::Absent);
  order_.clear();
  waiting_.clear();
  for (const auto& members : buckets_.assignment()) waiting_.push_back(members.size());
  while (tags_.size() < buckets_.size()) tags_.push_back(fmt::format("bucket {}", tags_.size()));

  auto pass = std::make_shared<Pass>();
  pass->reducer = weak_from_this();
  torch::autograd::Engine::get_default_engine().queue_callback([pass] {
    if (const auto owner = pass->reducer.lock()) owner->finish();
  });
  pass_ = pass.get();
}

void Reducer::launch(size_t bucket) {
  if (bucket + 1 == buckets_.size()) write_flags();
  works_.push_back(
      group_.all_reduce(buckets_.flat(bucket), ReduceOp::Average, {.tag = tags_[bucket]}));
  launched_ = bucket + 1;
}

// Nobody else moves a transport without a thread of its own.
void Reducer::drive() {
  while (completed_ < works_.size() && works_[completed_].is_completed()) ++completed_;
}

void Reducer::finish() {
  const at::NoGradGuard no_grad;
  std::vector<Unreached> unreached;
  if (order_.size() < parameters_.size()) unreached = contribute_unreached();
  while (launched_ < buckets_.size()) launch(launched_);
  const bool with_buffers = options_.buffers == Buffers::Broadcast && !buffers_.empty();
  if (with_buffers) buffers_.start(0, "buffers");
  for (auto& work : works_) work.wait();
  works_.clear();
  if (with_buffers) buffers_.finish();
  if (options_.unused == Unused::Error) refuse_unreached();
  if (!unreached.empty()) settle(unreached);
  forget();
  if (!rebuilt_) rebuild();
  pass_ = nullptr;
}

std::vector<Reducer::Unreached> Reducer::contribute_unreached() {
  std::vector<Unreached> unreached;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (steps_[i] == Step::Ready) continue;
    const at::Tensor& view = buckets_.view(i);
    const at::Tensor& gradient = parameters_[i].tensor.grad();
    Unreached item{i, {}};
    if (!gradient.defined()) {
      view.zero_();
      held_[i] = false;
    } else if (buckets_.holds(gradient, i)) {
      item.before = view.clone();
    } else {
      view.copy_(gradient);
    }
    unreached.push_back(std::move(item));
  }
  return unreached;
}

// For Zero a flag is 1 where the parameter was reached, for Error where it was not: what then
// matters is only whether the average is above 0, which no rounding of a narrow dtype can change.
void Reducer::write_flags() {
  const at::NoGradGuard no_grad;
  const float reached = options_.unused == Unused::Zero ? 1.0F : 0.0F;
  if (order_.size() == parameters_.size()) {
    buckets_.flags().fill_(reached);
    return;
  }
  std::vector<float> flags(parameters_.size());
  for (size_t i = 0; i < flags.size(); ++i) {
    flags[i] = steps_[i] == Step::Ready || held_[i] ? reached : 1.0F - reached;
  }
  buckets_.flags().copy_(torch::tensor(flags));
}

void Reducer::settle(const std::vector<Unreached>& unreached) {
  const at::Tensor flags = buckets_.flags().to(at::kCPU, at::kDouble);
  for (const auto& [parameter, before] : unreached) {
    if (flags[static_cast<int64_t>(parameter)].item<double>() > 0) {
      parameters_[parameter].tensor.mutable_grad() = buckets_.view(parameter);
    } else if (before.defined()) {
      buckets_.view(parameter).copy_(before);
    }
  }
}

void Reducer::refuse_unreached() const {
  if (!buckets_.flags().any().item<bool>()) return;
  const at::Tensor flags = buckets_.flags().to(at::kCPU, at::kDouble);
  std::vector<std::string> names;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (flags[static_cast<int64_t>(i)].item<double>() == 0) continue;
    const bool here = steps_[i] != Step::Ready && !held_[i];
    names.push_back(fmt::format("'{}'{}", parameters_[i].name, here ? "" : " (on another rank)"));
  }
  throw ConfigError(fmt::format(
      "[ddp] rank {}: {} of {} parameters got no gradient in backward(): {}. Give the loss a path "
      "to them, freeze them, or let them count as zero with unused = Unused::Zero",
      group_.rank(), names.size(), parameters_.size(), fmt::join(names, ", ")));
}

void Reducer::forget() { std::fill(held_.begin(), held_.end(), false); }

void Reducer::rebuild() {
  rebuilt_ = true;
  std::vector<size_t> order = order_;
  for (const auto& members : buckets_.assignment()) {
    for (size_t i : members) {
      if (steps_[i] != Step::Ready) order.push_back(i);
    }
  }
  const std::string bytes = group_.broadcast_bytes(
      {reinterpret_cast<const char*>(order.data()), order.size() * sizeof(size_t)}, 0,
      {.tag = "Ddp: order of gradients"});
  std::memcpy(order.data(), bytes.data(), bytes.size());
  auto assignment = assign_buckets(parameters_, order, options_);
  if (assignment == buckets_.assignment()) return;

  Buckets fresh(group_, parameters_, std::move(assignment));
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& gradient = parameters_[i].tensor.mutable_grad();
    if (gradient.defined() && buckets_.holds(gradient, i)) fresh.adopt(parameters_[i].tensor, i);
  }
  buckets_ = std::move(fresh);
}

}  // namespace lockstep::parallel
