// The part of Reducer that deals with parameters which a backward() did not reach.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/core/error.h"
#include "parallel/ddp/reducer/reducer.h"

namespace lockstep::parallel {

std::vector<char> Reducer::reached() const {
  if (lanes_) return lanes_->any_reached();
  std::vector<char> reached(parameters_.size());
  for (size_t i = 0; i < reached.size(); ++i) reached[i] = schedule_.is_complete(i) || held_[i];
  return reached;
}

std::vector<char> Reducer::lacking() const {
  const auto has = lanes_ ? lanes_->all_reached() : reached();
  std::vector<char> lacking(parameters_.size());
  for (size_t i = 0; i < lacking.size(); ++i)
    lacking[i] = !has[i] && parameters_[i].tensor.requires_grad();
  return lacking;
}

void Reducer::contribute_unreached() {
  for (size_t i = 0; i < dense_; ++i) {
    if (schedule_.is_complete(i)) continue;
    const at::Tensor& view = buckets_.view(i);
    const at::Tensor& gradient = parameters_[i].tensor.grad();
    Unreached item{i, {}};
    if (!gradient.defined()) {
      view.zero_();
      held_[i] = false;
    } else if (buckets_.holds(gradient, i)) {
      item.before = view.clone();
    } else if (fits(gradient, i)) {
      view.copy_(gradient);
    } else {
      object_to_gradient(i);
    }
    note_prior(i, /*is_reached=*/false);
    unreached_.push_back(std::move(item));
  }
  for (size_t i = dense_; i < parameters_.size(); ++i) {
    if (!schedule_.is_complete(i)) note_prior(i, /*is_reached=*/false);
  }
}

void Reducer::settle_unreached() {
  const auto used = unreached_.empty() ? std::vector<char>() : flags_.set();
  std::vector<std::string> unused;
  for (const auto& [parameter, before] : unreached_) {
    if (used[parameter]) {
      parameters_[parameter].tensor.mutable_grad() = buckets_.view(parameter);
      torch::autograd::impl::bump_version(buckets_.view(parameter));
      continue;
    }
    if (before.defined()) buckets_.view(parameter).copy_(before);
    unused.push_back(parameters_[parameter].name);
  }
  unreached_.clear();
  if (options_.hook) options_.hook->end_pass(unused);
}

// No rank waits in this pass to be told, so that all throw in the next.
void Reducer::object_to_frozen() {
  if (schedule_.all_complete() && !lanes_) return;
  const auto here = reached();
  std::vector<size_t> frozen;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!here[i] && !parameters_[i].tensor.requires_grad()) frozen.push_back(i);
  }
  if (frozen.empty()) return;
  const auto used = flags_.set();
  for (const size_t i : frozen) {
    if (used[i]) object(frozen_on_one_rank(parameters_[i].name));
  }
}

void Reducer::refuse_unreached() const {
  if (!flags_.any_lacking()) return;
  end_refused_pass();
  const auto of_all = flags_.lacking(), here = lacking();
  std::vector<std::string> names;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!of_all[i]) continue;
    names.push_back(
        fmt::format("'{}'{}", parameters_[i].name, here[i] ? "" : " (on another rank)"));
  }
  throw ConfigError(fmt::format(
      "[ddp] rank {}: {} of {} parameters got no gradient in backward(): {}. Give the loss a path "
      "to them, freeze them, or let them count as zero with unused = Unused::Zero",
      group_.rank(), names.size(), parameters_.size(), fmt::join(names, ", ")));
}

}  // namespace lockstep::parallel
