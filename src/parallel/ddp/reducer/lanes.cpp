// The part of Reducer that deals with several lanes a rank.
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <exception>

#include "parallel/ddp/reducer/reducer.h"
#include "parallel/lanes/rules.h"

namespace lockstep::parallel {

void Reducer::enter_lane(int64_t lane) {
  const int64_t own = lane - plan_->sum.lanes().begin;
  buffers_.follow(module_.follow_buffers());
  if (own != lanes_->next()) {
    object(change());
    object_to_missing_lane(objection_, *plan_, lanes_->next());
    lanes_->skip_to(own);
  }
  if (!warned_of_compiled_ && group_.rank() == 0 && is_compiled_anew(module_.module())) {
    warned_of_compiled_ = true;
    warn_of_compiled("ddp");
  }
  if (own == 0) {
    object_to_other_threads(objection_, "Ddp", options_.threads);
    lanes_->begin(parameters_);
    buffers_.begin_lanes();
  } else {
    buffers_.begin_lane();
  }
  std::fill(held_.begin(), held_.end(), false);
  plan_->open = own;
  plan_->has_pass = false;
}

void Reducer::leave_lane() {
  buffers_.follow(module_.follow_buffers());
  // The step cannot be finished without this lane's backward(), or when an exception ends the loop.
  if (lanes_->next() == plan_->open || std::uncaught_exceptions() > 0) buffers_.abandon_lanes();
  plan_->open = -1;
}

void Reducer::end_lanes() {
  if (lanes_->is_complete()) return;
  object(change());
  object_to_missing_lane(objection_, *plan_, lanes_->next());
  meet_without_backward();
}

void Reducer::begin_lane() {
  lanes_->begin_lane();
  object_unless_in_lane(objection_, *plan_, "Ddp");
  object_to_second_backward(objection_, *plan_);
}

// A gradient that autograd accumulates by itself is this lane's alone; arrived() then takes it.
at::Tensor Reducer::arriving_in_lane(size_t parameter, const at::Tensor& gradient) {
  const at::Tensor& tensor = parameters_[parameter].tensor;
  const bool is_own = *holds_ > 0 || is_sparse(parameter) || tensor.grad().defined() ||
                      at::GradMode::is_enabled() ||
                      torch::autograd::impl::post_acc_grad_hooks(tensor) ||
                      !fits(gradient, parameter);
  if (is_own) return gradient;
  lanes_->place(buckets_, parameter, gradient);
  schedule_.set(parameter, Step::Placed);
  return {};
}

void Reducer::take_in_lane(size_t parameter) {
  at::Tensor& gradient = parameters_[parameter].tensor.mutable_grad();
  if (is_sparse(parameter)) {
    lanes_->place_sparse(parameter, gradient);
  } else if (fits(gradient, parameter)) {
    lanes_->place(buckets_, parameter, gradient);
  } else {
    object_to_gradient(parameter);
  }
  gradient = at::Tensor();
}

void Reducer::complete_lane() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (schedule_.is_complete(i)) continue;
    if (held_[i] && parameters_[i].tensor.grad().defined()) {
      take_in_lane(i);
    } else {
      lanes_->place_nothing(buckets_, i);
    }
  }
  if (is_in_lane()) buffers_.end_lane(plan_->open);
  lanes_->end_lane();
  std::fill(held_.begin(), held_.end(), false);
}

void Reducer::make_lane_slots() {
  lanes_->make_slots(
      {parameters_.begin(), parameters_.begin() + static_cast<std::ptrdiff_t>(dense_)},
      buckets_.assignment(), flag_counts_.all());
}

void Reducer::abandon_lanes() {
  lanes_->reset();
  buffers_.abandon_lanes();
}

void Reducer::average_sparse_lanes() {
  std::vector<std::vector<at::Tensor>> lanes;
  for (size_t i = dense_; i < parameters_.size(); ++i) lanes.push_back(lanes_->sparse(i));
  const auto& all = lanes_->any_reached();
  sparse_.average_lanes(lanes, {all.begin() + static_cast<std::ptrdiff_t>(dense_), all.end()},
                        plan_->lanes);
}

void Reducer::settle_lanes() {
  const auto& mine = lanes_->any_reached();
  const bool all = std::find(mine.begin(), mine.end(), 0) == mine.end();
  const auto used = all ? mine : flags_.set();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& gradient = parameters_[i].tensor.mutable_grad();
    if (!used[i]) {
      gradient = lanes_->prior(i);
    } else if (!is_sparse(i)) {  // average_sparse_lanes() has set the others
      gradient = buckets_.view(i);
      torch::autograd::impl::bump_version(buckets_.view(i));
    }
  }
  lanes_->reset();
}

}  // namespace lockstep::parallel
