// The part of Reducer that serves Join: passes in which some ranks have no batch.
#include <fmt/format.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "parallel/ddp/reducer/reducer.h"
#include "parallel/layout/flat_memory.h"

namespace lockstep::parallel {

UsageFlags::Presence Reducer::presence() const {
  if (!shadows_) return UsageFlags::Presence::Backward;
  return any_held() ? UsageFlags::Presence::Held : UsageFlags::Presence::Absent;
}

void Reducer::note_prior(size_t parameter) {
  if (!join_.is_joined() || held_[parameter]) return;
  join_.note_prior(parameter, parameters_[parameter].tensor.grad());
}

void Reducer::find_present() {
  const bool any = join_.read(flags_);
  if (any && join_.divides_by_present()) {
    for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
      const at::Tensor& flat = buckets_.bucket(bucket).flat;
      // A hook has averaged over all ranks.
      if (options_.hook) flat.mul_(group_.size());
      flat.div_(join_.count_present());
    }
  }
  if (any && !join_.all_present() && flags_.has_prior()) add_priors();
  join_.forget_priors();
}

void Reducer::add_priors() {
  const int source = join_.present().front();
  std::string has_prior(parameters_.size(), '\0');
  for (size_t i = 0; i < parameters_.size(); ++i) has_prior[i] = join_.prior(i).defined() ? 1 : 0;
  has_prior = group_.broadcast_bytes(has_prior, source, call("earlier gradients"));
  const double share = static_cast<double>(group_.size() - join_.count_present()) / group_.size();
  const auto used = flags_.set();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (has_prior[i] == 0 || (options_.unused == Unused::Zero && !used[i])) continue;
    if (is_sparse(i)) {
      end_refused_pass();
      throw ConfigError(fmt::format(
          "[join] parameter '{}' has a sparse gradient and got one in a second backward() of one "
          "step, in which some ranks have no batch: add the losses and run one backward(), or use "
          "Divisor::Active",
          parameters_[i].name));
    }
    const at::Tensor view = as_reals(buckets_.view(i));
    at::Tensor prior = at::empty_like(view);
    if (group_.rank() == source) prior.copy_(as_reals(join_.prior(i)));
    group_.broadcast(prior, source, call("earlier gradient")).wait();
    view.add_(prior, share);
  }
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
  return join_.any_in_backward();
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

}  // namespace lockstep::parallel
