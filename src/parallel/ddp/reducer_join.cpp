// The part of Reducer that serves Join: passes in which some ranks have no batch.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/core/error.h"
#include "parallel/ddp/reducer.h"
#include "parallel/layout/flat_memory.h"

namespace lockstep::parallel {

UsageFlags::Presence Reducer::presence() const {
  if (!shadows_) return UsageFlags::Presence::Backward;
  return std::ranges::find(held_, 1) != held_.end() ? UsageFlags::Presence::Held
                                                    : UsageFlags::Presence::Absent;
}

// A gradient that is not zeroed between two backward() of a step is part of what this rank
// contributes to the second. With Divisor::World an absent rank contributes nothing in its place.
void Reducer::note_prior(size_t parameter) {
  if (!join_ || join_->divisor != Divisor::World || held_[parameter]) return;
  if (priors_[parameter].defined()) return;
  const at::Tensor& gradient = parameters_[parameter].tensor.grad();
  if (gradient.defined()) priors_[parameter] = gradient.detach().clone();
}

void Reducer::find_present() {
  const auto present = flags_.present(), in_backward = flags_.in_backward();
  somebody_ = !in_backward.empty();
  if (somebody_) in_backward_ = in_backward;
  if (!present.empty()) present_ = present;
  if (!present.empty() && divides_by_present()) {
    for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
      const at::Tensor& flat = buckets_.bucket(bucket).flat;
      // A hook has taken the average over all.
      if (options_.hook) flat.mul_(group_.size());
      flat.div_(static_cast<int64_t>(present_.size()));
    }
  }
  const bool all = static_cast<int>(present_.size()) == group_.size();
  if (!all && !present.empty() && flags_.has_prior()) add_priors();
  std::fill(priors_.begin(), priors_.end(), at::Tensor());
}

void Reducer::add_priors() {
  const int source = present_.front();
  std::string has_prior(parameters_.size(), '\0');
  for (size_t i = 0; i < parameters_.size(); ++i) has_prior[i] = priors_[i].defined() ? 1 : 0;
  has_prior = group_.broadcast_bytes(has_prior, source, call("earlier gradients"));
  const double share =
      static_cast<double>(group_.size() - static_cast<int>(present_.size())) / group_.size();
  const auto used = flags_.set();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (has_prior[i] == 0 || (options_.unused == Unused::Zero && !used[i])) continue;
    if (is_sparse(i)) {
      throw ConfigError(fmt::format(
          "[join] parameter '{}' has a sparse gradient and got one in a second backward() of one "
          "step, in which some ranks have no batch: add the losses and run one backward(), or use "
          "Divisor::Active",
          parameters_[i].name));
    }
    const at::Tensor view = as_reals(buckets_.view(i));
    at::Tensor prior = at::empty_like(view);
    if (group_.rank() == source) prior.copy_(as_reals(priors_[i]));
    group_.broadcast(prior, source, call("earlier gradient")).wait();
    view.add_(prior, share);
  }
}

std::vector<int> Reducer::leave() {
  join_.reset();
  gate_.reset();
  present_ = all_ranks(group_);
  return std::exchange(in_backward_, all_ranks(group_));
}

bool Reducer::shadow() {
  const at::NoGradGuard no_grad;
  shadows_ = true;
  if (presence() == UsageFlags::Presence::Absent) {
    // Of ignored parameters, too: the step that follows would use what an earlier one left there.
    module_.zero_grad();
    forget();
  }
  meet_without_backward();
  return somebody_;
}

void Reducer::meet_without_backward() {
  shadows_ = true;
  try {
    begin();
    finish();
  } catch (...) {
    shadows_ = false;
    throw;
  }
  shadows_ = false;
}

void Reducer::refuse_uneven() const {
  if (join_->uneven != Uneven::Throw || shadows_) return;
  if (static_cast<int>(in_backward_.size()) == group_.size()) return;
  throw DataError(
      fmt::format("[join] rank {} has a batch for pass {}, but only {} of {} ranks have one: give "
                  "all ranks as many (a sampler that pads or drops), or use Uneven::Continue",
                  group_.rank(), clock_.count(), in_backward_.size(), group_.size()));
}

}  // namespace lockstep::parallel
