#include "parallel/lanes/gradients.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace lockstep::parallel {

LaneGradients::LaneGradients(std::shared_ptr<const LanePlan> plan, size_t parameters, size_t dense)
    : plan_(std::move(plan)),
      dense_(dense),
      any_(parameters),
      all_(parameters),
      in_lane_(parameters),
      sparse_(parameters - dense),
      priors_(parameters) {
  reset();
}

void LaneGradients::make_slots(const std::vector<Named>& dense, const Assignment& assignment,
                               size_t flags) {
  more_.clear();
  for (int slot = 1; slot < plan_->slots; ++slot)
    more_.emplace_back(Group(), dense, assignment, flags);
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
  for (auto& lanes : sparse_) lanes.assign(plan_->own_lanes(), at::Tensor());
}

void LaneGradients::end_lane() {
  for (size_t i = 0; i < all_.size(); ++i) all_[i] = all_[i] && in_lane_[i];
  complete_ = next_ + 1 == plan_->own_lanes();
  next_ = complete_ ? 0 : next_ + 1;
}

void LaneGradients::reached(size_t parameter) { any_[parameter] = in_lane_[parameter] = true; }

at::Tensor LaneGradients::with_prior(size_t parameter, const at::Tensor& gradient) const {
  const at::Tensor& prior = priors_[parameter];
  return prior.defined() ? prior + gradient : gradient;
}

void LaneGradients::put(const Buckets& first, size_t parameter, const at::Tensor& value) {
  plan_->place(next_, value, [&](int slot) -> const at::Tensor& {
    return slot == 0 ? first.view(parameter) : more_[slot - 1].view(parameter);
  });
}

void LaneGradients::place(const Buckets& first, size_t parameter, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  reached(parameter);
  put(first, parameter, with_prior(parameter, gradient.detach()));
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
  sparse_[parameter - dense_][next_] = with_prior(parameter, gradient.detach());
}

comm::Work LaneGradients::average(const Buckets& first, size_t bucket,
                                  const comm::CallOptions& options) const {
  std::vector<at::Tensor> parts{first.flat(bucket)};
  for (size_t k = 1; k < plan_->sum.nodes().size(); ++k) parts.push_back(more_[k - 1].flat(bucket));
  return plan_->sum.average(parts, options);
}

}  // namespace lockstep::parallel
