// The part of BufferSync that deals with several lanes a rank.
#include <ATen/ATen.h>

#include <algorithm>

#include "parallel/ddp/buffers.h"

namespace lockstep::parallel {

void BufferSync::use_lanes(std::shared_ptr<const LanePlan> plan) {
  lanes_ = Lanes{.plan = std::move(plan),
                 .start = {},
                 .first = {},
                 .changed = std::vector<char>(buffers_.size()),
                 .slots = {}};
  for (const Flat& averaged : averaged_) {
    auto& slots = lanes_->slots.emplace_back();
    for (int slot = 0; slot < lanes_->plan->slots; ++slot) {
      slots.push_back(at::zeros_like(averaged.flat));
    }
  }
}

void BufferSync::begin_lanes() {
  const at::NoGradGuard no_grad;
  lanes_->changed.assign(buffers_.size(), false);
  lanes_->start.clear();
  for (const auto& item : buffers_) lanes_->start.push_back(own_elements(item.tensor).clone());
}

void BufferSync::begin_lane() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (lanes_->changed[i]) write(i, lanes_->start[i]);
  }
}

// What a lane leaves as the step began counts as changed all the same, where an earlier lane
// changed it: that costs a copy and no bit.
void BufferSync::end_lane(int64_t own_lane) {
  const at::NoGradGuard no_grad;
  if (buffers_.empty()) return;
  compare();
  for (size_t i = 0; i < buffers_.size(); ++i) {
    lanes_->changed[i] = lanes_->changed[i] || changed_[i];
  }
  if (lanes_->plan->sum.lanes().begin + own_lane == 0 && lanes_->plan->own_lanes() > 1) {
    lanes_->first.clear();
    for (const auto& item : buffers_) lanes_->first.push_back(own_elements(item.tensor).clone());
  }
  for (size_t k = 0; k < averaged_.size(); ++k) {
    const auto& slots = lanes_->slots[k];
    const at::Tensor leaf = at::zeros_like(averaged_[k].flat);
    const auto places = places_in(averaged_[k], leaf);
    for (size_t m = 0; m < places.size(); ++m) {
      places[m].copy_(own_elements(buffers_[averaged_[k].members[m]].tensor));
    }
    lanes_->plan->place(own_lane, leaf, [&](int slot) -> const at::Tensor& { return slots[slot]; });
  }
}

void BufferSync::restore_first_lane() {
  if (lanes_->plan->sum.lanes().begin != 0 || lanes_->plan->own_lanes() == 1) return;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (lanes_->changed[i]) write(i, lanes_->first[i]);
  }
}

void BufferSync::finish_lanes(const std::vector<double>& shares) {
  const at::NoGradGuard no_grad;
  restore_first_lane();
  copied_.start(0, "buffers");
  divisor_ = 1;
  const auto nodes = static_cast<std::ptrdiff_t>(lanes_->plan->sum.nodes().size());
  for (size_t k = 0; k < averaged_.size(); ++k) {
    const auto& slots = lanes_->slots[k];
    lanes_->plan->sum.average({slots.begin(), slots.begin() + nodes}, {.label = "buffers"}).wait();
    averaged_[k].flat.copy_(slots[0]);
  }
  finish(shares);
}

}  // namespace lockstep::parallel
