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

void Reducer::note_prior(size_t parameter, bool is_reached) {
  if (!join_.is_joined() || held_[parameter]) return;
  if (is_reached && join_.divides_by_present()) return;
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
  if (any && !join_.all_present() && flags_.has_prior()) take_priors();
  join_.forget_priors();
}

// A parameter's gradient of before the pass, on all ranks.
at::Tensor Reducer::sent_by(int source, size_t parameter) const {
  const auto options = call("earlier gradient");
  const bool is_source = group_.rank() == source;
  const at::Tensor& tensor = parameters_[parameter].tensor;
  const auto send = [&](at::Tensor values, const at::Tensor& own) {
    if (is_source) values.copy_(own);
    if (values.numel() > 0) group_.broadcast(as_reals(values), source, options).wait();
    return values;
  };
  if (!is_sparse(parameter)) {
    return send(at::empty_like(buckets_.view(parameter)), join_.prior(parameter));
  }
  const at::Tensor own = is_source ? join_.prior(parameter).coalesce() : at::Tensor();
  const at::Tensor counts =
      send(at::empty({2}, tensor.options().dtype(at::kLong)),
           is_source ? at::tensor({own.sparse_dim(), own._nnz()}) : at::Tensor());
  const auto dims = counts[0].item<int64_t>(), entries = counts[1].item<int64_t>();
  std::vector<int64_t> sizes = tensor.sizes().slice(static_cast<size_t>(dims)).vec();
  sizes.insert(sizes.begin(), entries);
  const at::Tensor indices =
      send(at::empty({dims, entries}, counts.options()), is_source ? own._indices() : at::Tensor());
  const at::Tensor values =
      send(at::empty(sizes, tensor.options()), is_source ? own._values() : at::Tensor());
  return at::_sparse_coo_tensor_unsafe(indices, values, tensor.sizes())._coalesced_(true);
}

// A rank with a batch may have gradients of before the pass. Where some rank has computed another,
// that was added to them, and ranks without a batch have nothing in their place. Where none has,
// they are as they were, and what follows backward() uses them.
void Reducer::take_priors() {
  const int source = join_.present().front();
  std::string has_prior(parameters_.size(), '\0');
  for (size_t i = 0; i < parameters_.size(); ++i) has_prior[i] = join_.prior(i).defined() ? 1 : 0;
  has_prior = group_.broadcast_bytes(has_prior, source, call("earlier gradients"));
  const double share =
      join_.divides_by_present()
          ? 0
          : static_cast<double>(group_.size() - join_.count_present()) / group_.size();
  const auto used = flags_.set();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (has_prior[i] == 0 || (used[i] && share == 0)) continue;
    if (used[i] && is_sparse(i)) {
      end_refused_pass();
      throw ConfigError(fmt::format(
          "[join] parameter '{}' has a sparse gradient and got one in a second backward() of one "
          "step, in which some ranks have no batch: add the losses and run one backward(), or use "
          "Divisor::Active",
          parameters_[i].name));
    }
    const at::Tensor prior = sent_by(source, i);
    at::Tensor& gradient = parameters_[i].tensor.mutable_grad();
    if (used[i]) {
      as_reals(buckets_.view(i)).add_(as_reals(prior), share);
    } else if (!gradient.defined()) {
      gradient = prior;
    }
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
