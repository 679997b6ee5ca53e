#include "parallel/lanes/gradients.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace lockstep::parallel {
namespace {

// Whether nothing else refers to `tensor` or its memory, the memory is no larger than the tensor,
// and libtorch allows writing to it in place. The gradient of a Linear's weight is a view, which
// alone refers to its base.
bool is_exclusive(const at::Tensor& tensor) {
  if (tensor.use_count() != 1 || tensor.requires_grad() || !tensor.has_storage()) return false;
  const c10::Storage& storage = tensor.storage();
  const size_t owners = tensor.is_view() && tensor._base().use_count() == 1 ? 2 : 1;
  return storage.use_count() == owners && storage.resizable() &&
         storage.nbytes() == tensor.nbytes() && tensor.is_non_overlapping_and_dense() &&
         !tensor.is_conj() && !tensor.is_neg() && !tensor.is_inference() &&
         !tensor._is_zerotensor();
}

}  // namespace

LaneGradients::LaneGradients(std::shared_ptr<const LanePlan> plan, size_t parameters, size_t dense)
    : plan_(std::move(plan)),
      dense_(dense),
      any_(parameters),
      all_(parameters),
      in_lane_(parameters),
      sparse_(parameters - dense),
      priors_(parameters),
      waiting_(dense) {
  reset();
  for (int64_t lane = 0; lane < plan_->own_lanes(); ++lane) {
    const auto& move = plan_->moves[lane];
    if (!waits(lane)) slots_ = std::max(slots_, move.slot + (move.carries > 0 ? 0 : 1));
  }
}

bool LaneGradients::waits(int64_t own_lane) const {
  return own_lane + 1 < plan_->own_lanes() && plan_->moves[own_lane + 1].adds &&
         !plan_->moves[own_lane].adds;
}

void LaneGradients::make_slots(const std::vector<Named>& dense, const Assignment& assignment,
                               size_t flags) {
  more_.clear();
  for (int slot = 1; slot < slots_; ++slot) more_.emplace_back(Group(), dense, assignment, flags);
}

void LaneGradients::begin(const std::vector<Named>& parameters) {
  reset();
  complete_ = false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor& gradient = parameters[i].tensor.mutable_grad();
    if (!gradient.defined()) continue;
    // The bucket is where the lanes are added up.
    priors_[i] = gradient.detach().clone();
    gradient = at::Tensor();
  }
}

void LaneGradients::reset() {
  next_ = 0;
  std::ranges::fill(any_, false);
  std::ranges::fill(all_, true);
  std::ranges::fill(priors_, at::Tensor());
  std::ranges::fill(waiting_, at::Tensor());
  for (auto& lanes : sparse_) lanes.assign(plan_->own_lanes(), at::Tensor());
}

void LaneGradients::end_lane() {
  for (size_t i = 0; i < all_.size(); ++i) all_[i] = all_[i] && in_lane_[i];
  complete_ = next_ + 1 == plan_->own_lanes();
  next_ = complete_ ? 0 : next_ + 1;
}

void LaneGradients::reached(size_t parameter) { any_[parameter] = in_lane_[parameter] = true; }

void LaneGradients::put(const Buckets& first, size_t parameter, const at::Tensor& value) {
  const auto slot = [&](int k) -> const at::Tensor& {
    return k == 0 ? first.view(parameter) : more_[k - 1].view(parameter);
  };
  at::Tensor& waiting = waiting_[parameter];
  if (waits(next_)) {
    waiting = is_exclusive(value) ? value : value.clone();
  } else if (next_ > 0 && waits(next_ - 1)) {
    // Undefined where that lane had no backward(), with which the step ends.
    if (waiting.defined()) plan_->place_pair(next_, waiting, value, slot);
    waiting = at::Tensor();
  } else {
    plan_->place(next_, value, slot);
  }
}

void LaneGradients::place(const Buckets& first, size_t parameter, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  reached(parameter);
  const at::Tensor& prior = priors_[parameter];
  // Not by ?:, whose copy would have the gradient twice.
  if (prior.defined()) {
    put(first, parameter, prior + gradient);
  } else {
    put(first, parameter, gradient);
  }
}

// Adding zeros is not the same as adding nothing: it makes -0 a 0, as it does where a lane has a
// rank of its own.
void LaneGradients::place_nothing(const Buckets& first, size_t parameter) {
  const at::NoGradGuard no_grad;
  const at::Tensor& prior = priors_[parameter];
  if (parameter >= dense_) {
    sparse_[parameter - dense_][next_] = prior;
    return;
  }
  put(first, parameter,
      prior.defined()
          ? prior
          : at::zeros({}, first.view(parameter).options()).expand(first.view(parameter).sizes()));
}

void LaneGradients::place_sparse(size_t parameter, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  reached(parameter);
  const at::Tensor& prior = priors_[parameter];
  sparse_[parameter - dense_][next_] = prior.defined() ? prior + gradient : gradient.detach();
}

comm::Work LaneGradients::average(const Buckets& first, size_t bucket,
                                  const comm::CallOptions& options) const {
  std::vector<at::Tensor> parts{first.flat(bucket)};
  for (size_t k = 1; k < plan_->sum.nodes().size(); ++k) parts.push_back(more_[k - 1].flat(bucket));
  return plan_->sum.average(parts, options);
}

}  // namespace lockstep::parallel
