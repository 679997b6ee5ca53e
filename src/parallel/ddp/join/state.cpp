#include "parallel/ddp/join/state.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/core/error.h"
#include "parallel/ddp/buffers/buffers.h"

namespace lockstep::parallel {

JoinState::JoinState(const Group& group, size_t parameters)
    : group_(group),
      present_(all_ranks(group)),
      in_backward_(all_ranks(group)),
      priors_(parameters) {}

void JoinState::begin(const JoinOptions& options, std::shared_ptr<JoinGate> gate) {
  options_ = options;
  gate_ = std::move(gate);
}

std::vector<int> JoinState::leave() {
  options_.reset();
  gate_.reset();
  present_ = all_ranks(group_);
  return std::exchange(in_backward_, all_ranks(group_));
}

bool JoinState::read(const UsageFlags& flags) {
  const auto present = flags.present(), in_backward = flags.in_backward();
  somebody_ = !in_backward.empty();
  if (somebody_) in_backward_ = in_backward;
  if (!present.empty()) present_ = present;
  return !present.empty();
}

void JoinState::note_prior(size_t parameter, const at::Tensor& gradient) {
  if (!options_ || priors_[parameter].defined()) return;
  if (gradient.defined()) priors_[parameter] = gradient.detach().clone();
}

bool JoinState::has_prior() const { return std::ranges::any_of(priors_, &at::Tensor::defined); }

void JoinState::forget_priors() { std::ranges::fill(priors_, at::Tensor()); }

void JoinState::refuse_uneven(int64_t pass) const {
  if (!options_ || options_->uneven != Uneven::Throw || all_in_backward()) return;
  throw DataError(
      fmt::format("[join] rank {} has a batch for pass {}, but only {} of {} ranks have one: give "
                  "all ranks as many (a sampler that pads or drops), or use Uneven::Continue",
                  group_.rank(), pass, in_backward_.size(), group_.size()));
}

void JoinState::end_forward() {
  if (gate_) gate_->end_forward();
}

}  // namespace lockstep::parallel
