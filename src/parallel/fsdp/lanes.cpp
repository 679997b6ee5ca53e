// The part of Fsdp that deals with several lanes a rank.
#include <algorithm>
#include <exception>

#include "parallel/fsdp/state.h"
#include "parallel/lanes/rules.h"

namespace lockstep::parallel {

void Fsdp::State::enter_lane(int64_t lane) {
  const int64_t own = lane - lane_plan_->sum.lanes().begin;
  if (own != next_lane_) {
    object_to_missing_lane(objection_, *lane_plan_, next_lane_);
    next_lane_ = own;
  }
  if (own == 0) {
    object_to_other_threads(objection_, "Fsdp", plan_.options.threads);
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
  lane_plan_->has_pass = false;
}

void Fsdp::State::leave_lane() {
  // The step cannot be finished without this lane's backward(), or when an exception ends the loop.
  if (!lane_done_ || std::uncaught_exceptions() > 0) buffers_->abandon_lanes();
  lane_plan_->open = -1;
}

void Fsdp::State::end_lanes() {
  if (lanes_complete_) return;
  object_to_missing_lane(objection_, *lane_plan_, next_lane_);
  begin_pass();
  in_pass_ = false;
  finish_pass();
}

// All ranks call it, however many lanes they have.
void Fsdp::State::open_for_lanes() {
  close_for_lanes();
  lanes_complete_ = false;
  std::ranges::fill(reached_, false);
  if (whole_) return unshard();
  if (plan_.shares || lane_plan_->lanes % plan_.all.size() == 0) return publish();
  // A rank with fewer lanes would not call the others' gathers.
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

void Fsdp::State::begin_lane_pass() {
  object_unless_in_lane(objection_, *lane_plan_, "Fsdp");
  object_to_second_backward(objection_, *lane_plan_);
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
