// The part of Reducer that deals with parameters which a backward() did not reach.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/core/error.h"
#include "parallel/ddp/reducer/reducer.h"

namespace lockstep::parallel {

std::vector<char> Reducer::reached() const {
  if (lanes_) {
    return options_.unused == Unused::Error ? lanes_->all_reached() : lanes_->any_reached();
  }
  std::vector<char> reached(parameters_.size());
  for (size_t i = 0; i < reached.size(); ++i) reached[i] = schedule_.is_complete(i) || held_[i];
  return reached;
}

std::vector<Reducer::Unreached> Reducer::contribute_unreached() {
  std::vector<Unreached> unreached;
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
    note_prior(i);
    unreached.push_back(std::move(item));
  }
  for (size_t i = dense_; i < parameters_.size(); ++i) {
    if (!schedule_.is_complete(i)) note_prior(i);
  }
  return unreached;
}

void Reducer::settle(const std::vector<Unreached>& unreached) {
  const auto used = flags_.set();
  for (const auto& [parameter, before] : unreached) {
    // With Error no parameter gets here that some rank lacks.
    if (options_.unused == Unused::Error || used[parameter]) {
      parameters_[parameter].tensor.mutable_grad() = buckets_.view(parameter);
      torch::autograd::impl::bump_version(buckets_.view(parameter));
    } else if (before.defined()) {
      buckets_.view(parameter).copy_(before);
    }
  }
}

void Reducer::refuse_unreached() const {
  if (!flags_.any_set()) return;
  const auto lacking = flags_.set();
  const auto here = reached();
  std::vector<std::string> names;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!lacking[i]) continue;
    names.push_back(
        fmt::format("'{}'{}", parameters_[i].name, here[i] ? " (on another rank)" : ""));
  }
  throw ConfigError(fmt::format(
      "[ddp] rank {}: {} of {} parameters got no gradient in backward(): {}. Give the loss a path "
      "to them, freeze them, or let them count as zero with unused = Unused::Zero",
      group_.rank(), names.size(), parameters_.size(), fmt::join(names, ", ")));
}

}  // namespace lockstep::parallel
