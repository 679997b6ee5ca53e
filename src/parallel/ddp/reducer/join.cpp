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

// A gradient of before the pass, on all ranks. `own`: the source's.
at::Tensor Reducer::sent_by(int source, const at::Tensor& parameter, const at::Tensor& own,
                            bool sparse) const {
  const auto options = call("earlier gradient");
  const bool is_source = group_.rank() == source;
  const auto on =
      at::TensorOptions(parameter.scalar_type()).device(communicated_on(group_, parameter));
  const auto send = [&](at::Tensor values, const at::Tensor& from) {
    if (is_source) values.copy_(from);
    if (values.numel() > 0) group_.broadcast(as_reals(values), source, options).wait();
    return values;
  };
  if (!sparse) return send(at::empty_like(parameter.detach(), on), own).to(parameter.device());
  const at::Tensor entries = is_source ? own.coalesce() : at::Tensor();
  const at::Tensor counts =
      send(at::empty({2}, on.dtype(at::kLong)),
           is_source ? at::tensor({entries.sparse_dim(), entries._nnz()}) : at::Tensor());
  const auto dims = counts[0].item<int64_t>(), count = counts[1].item<int64_t>();
  std::vector<int64_t> sizes = parameter.sizes().slice(static_cast<size_t>(dims)).vec();
  sizes.insert(sizes.begin(), count);
  const at::Tensor indices = send(at::empty({dims, count}, on.dtype(at::kLong)),
                                  is_source ? entries._indices() : at::Tensor());
  const at::Tensor values =
      send(at::empty(sizes, on), is_source ? entries._values() : at::Tensor());
  return at::_sparse_coo_tensor_unsafe(indices.to(parameter.device()),
                                       values.to(parameter.device()), parameter.sizes())
      ._coalesced_(true);
}

// A rank with a batch may have gradients of before the pass. Where some rank has computed another,
// that was added to them, and ranks without a batch have nothing in their place. Where none has, as
// of a frozen parameter, they are as they were, and what follows backward() uses them.
void Reducer::take_priors() {
  enum Prior : char { None, Dense, Sparse, WithoutEntries };
  const int source = join_.present().front();
  std::vector<at::Tensor> mine;
  for (size_t i = 0; i < parameters_.size(); ++i) mine.push_back(join_.prior(i));
  for (const Named& item : frozen_) mine.push_back(item.tensor.grad());
  std::string priors;
  for (const at::Tensor& prior : mine) {
    priors += !prior.defined()     ? None
              : !prior.is_sparse() ? Dense
              : prior._nnz() > 0   ? Sparse
                                   : WithoutEntries;
  }
  priors = group_.broadcast_bytes(priors, source, call("earlier gradients"));
  const double share =
      join_.divides_by_present()
          ? 0
          : static_cast<double>(group_.size() - join_.count_present()) / group_.size();
  auto used = flags_.set();
  used.resize(mine.size());  // none of the frozen ones
  for (size_t i = 0; i < mine.size(); ++i) {
    const auto kind = static_cast<Prior>(priors[i]);
    if (kind == None || (used[i] && (share == 0 || kind == WithoutEntries))) continue;
    const Named& item = i < parameters_.size() ? parameters_[i] : frozen_[i - parameters_.size()];
    if (used[i] && is_sparse(i)) {
      end_refused_pass();
      throw ConfigError(fmt::format(
          "[join] parameter '{}' has a sparse gradient and got one in a second backward() of one "
          "step, in which some ranks have no batch: add the losses and run one backward(), or use "
          "Divisor::Active",
          item.name));
    }
    const at::Tensor prior = sent_by(source, item.tensor, mine[i], kind != Dense);
    at::Tensor& gradient = item.tensor.mutable_grad();
    if (used[i]) {
      as_reals(buckets_.view(i)).add_(as_reals(prior), share);
    } else if (!gradient.defined()) {
      gradient = prior;
    }
  }
}

bool Reducer::has_prior() const {
  if (join_.has_prior()) return true;
  return join_.is_joined() && std::ranges::any_of(frozen_, [](const Named& item) {
           return item.tensor.grad().defined();
         });
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
