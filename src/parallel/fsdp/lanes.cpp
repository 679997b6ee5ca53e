// The part of Fsdp that deals with several lanes a rank.
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>

#include "parallel/fsdp/state.h"

namespace lockstep::parallel {

bool Fsdp::State::is_in_lane() const { return lane_plan_ && lane_plan_->open >= 0; }

bool Fsdp::State::is_last_lane() const {
  return !is_in_lane() || lane_plan_->open + 1 == lane_plan_->own_lanes();
}

std::string Fsdp::State::lane_text(int64_t own_lane) const {
  return fmt::format("lane {} of {}", lane_plan_->sum.lanes().begin + own_lane, lane_plan_->lanes);
}

void Fsdp::State::enter_lane(int64_t lane) {
  const int64_t own = lane - lane_plan_->sum.lanes().begin;
  if (own != next_lane_) {
    object_to_missing_lane();
    next_lane_ = own;
  }
  if (own == 0 && at::get_num_threads() != plan_.options.threads) {
    object(fmt::format(
        "this rank computes with {} threads now, FsdpOptions::threads are {}: kernels divide their "
        "sums by that number, so leave it as it is",
        at::get_num_threads(), plan_.options.threads));
  }
  if (own == 0) {
    open_for_lanes();
    buffers_->begin_lanes();
  } else {
    buffers_->begin_lane();
  }
  for (const auto& unit : units_) {
    for (auto& flat : unit->flats) memory_->take_back(flat.drop_gradients());
  }
  lane_done_ = false;
  lane_plan_->open = own;
}

void Fsdp::State::leave_lane() { lane_plan_->open = -1; }

void Fsdp::State::end_lanes() {
  if (lanes_complete_) return;
  object_to_missing_lane();
  begin_pass();
  in_pass_ = false;
  finish_pass();
}

// All ranks call it, however many lanes they have.
void Fsdp::State::open_for_lanes() {
  close_for_lanes();
  lanes_complete_ = false;
  std::ranges::fill(reached_, false);
  if (whole_) return;
  if (plan_.shares || lane_plan_->lanes % plan_.all.size() == 0) return publish();
  // A rank with a lane less would be missing when the others gather.
  unshard();
  opened_for_lanes_ = true;
}

void Fsdp::State::close_for_lanes() {
  if (!opened_for_lanes_) return;
  opened_for_lanes_ = false;
  reshard();
}

void Fsdp::State::reset_lanes() {
  next_lane_ = 0;
  close_for_lanes();
}

void Fsdp::State::object_to_missing_lane() {
  object(fmt::format(
      "{} of the step has had no backward() outside of hold(): run one in every lane, and after an "
      "exception zero_grad() before the next step",
      lane_text(next_lane_)));
}

void Fsdp::State::object_unless_in_lane() {
  if (is_in_lane()) return;
  object(
      fmt::format("backward() outside of a lane, with FsdpOptions::lanes = {}: run it within for "
                  "(auto [x, y] : "
                  "fsdp.lanes(step))",
                  lane_plan_->lanes));
}

void Fsdp::State::begin_lane_pass() {
  object_unless_in_lane();
  if (is_in_lane() && lane_done_) {
    object(
        fmt::format("a second backward() in {}: add the losses and run one, or run all but the "
                    "last under hold()",
                    lane_text(lane_plan_->open)));
  }
}

void Fsdp::State::end_lane_pass() {
  if (!is_in_lane()) {
    lanes_complete_ = true;
    next_lane_ = 0;
    return;
  }
  buffers_->end_lane(lane_plan_->open);
  lane_done_ = true;
  lanes_complete_ = is_last_lane();
  next_lane_ = lanes_complete_ ? 0 : lane_plan_->open + 1;
}

}  // namespace lockstep::parallel
