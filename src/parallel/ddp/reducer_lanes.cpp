// The part of Reducer that deals with several lanes a rank.
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "parallel/ddp/reducer.h"

namespace lockstep::parallel {

bool Reducer::is_last_lane() const {
  return !is_in_lane() || plan_->open + 1 == plan_->own_lanes();
}

bool Reducer::is_in_lane() const { return lanes_ && plan_->open >= 0; }

std::string Reducer::lane_text(int64_t own_lane) const {
  return fmt::format("lane {} of {}", plan_->sum.lanes().begin + own_lane, plan_->lanes);
}

void Reducer::enter_lane(int64_t lane) {
  const int64_t own = lane - plan_->sum.lanes().begin;
  if (own != lanes_->next()) {
    object_to_missing_lane();
    lanes_->skip_to(own);
  }
  if (own == 0 && at::get_num_threads() != options_.threads) {
    object(fmt::format(
        "this rank computes with {} threads now, DdpOptions::threads are {}: kernels divide their "
        "sums by that number, so leave it as it is",
        at::get_num_threads(), options_.threads));
  }
  if (own == 0) {
    lanes_->begin(parameters_);
    buffers_.begin_lanes();
  } else {
    buffers_.begin_lane();
  }
  std::fill(held_.begin(), held_.end(), false);
  plan_->open = own;
}

void Reducer::leave_lane() { plan_->open = -1; }

void Reducer::end_lanes() {
  if (lanes_->is_complete()) return;
  object_to_missing_lane();
  meet_without_backward();
}

void Reducer::object_to_missing_lane() {
  object(fmt::format(
      "{} of the step has had no backward() outside of hold(): run one in every lane, and after an "
      "exception zero_grad() before the next step",
      lane_text(lanes_->next())));
}

void Reducer::object_unless_in_lane() {
  if (is_in_lane()) return;
  object(fmt::format(
      "backward() outside of a lane, with DdpOptions::lanes = {}: run it within for (auto [x, y] : "
      "ddp.lanes(step))",
      plan_->lanes));
}

void Reducer::begin_lane() {
  lanes_->begin_lane();
  object_unless_in_lane();
  if (is_in_lane() && plan_->open != lanes_->next()) {
    object(
        fmt::format("a second backward() in {}: add the losses and run one, or run all but the "
                    "last under hold()",
                    lane_text(plan_->open)));
  }
}

// What autograd is to accumulate by itself is this lane's alone, and arrived() takes it.
at::Tensor Reducer::arriving_in_lane(size_t parameter, const at::Tensor& gradient) {
  const at::Tensor& tensor = parameters_[parameter].tensor;
  const bool is_own = *holds_ > 0 || is_sparse(parameter) || tensor.grad().defined() ||
                      at::GradMode::is_enabled() ||
                      torch::autograd::impl::post_acc_grad_hooks(tensor) ||
                      !fits(gradient, parameter);
  if (is_own) return gradient;
  lanes_->place(buckets_, parameter, gradient);
  steps_[parameter] = Step::Placed;
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
    if (steps_[i] == Step::Ready) continue;
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
  for (size_t i = 0; i < dense_; ++i) {
    at::Tensor& gradient = parameters_[i].tensor.mutable_grad();
    if (options_.unused == Unused::Error || used[i]) {
      gradient = buckets_.view(i);
      torch::autograd::impl::bump_version(buckets_.view(i));
    } else {
      gradient = lanes_->prior(i);
    }
  }
  lanes_->reset();
}

}  // namespace lockstep::parallel
