// The part of BufferSync that deals with several lanes a rank.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "lockstep/core/error.h"
#include "parallel/ddp/buffers/buffers.h"
#include "parallel/ddp/consistency/fingerprint.h"

namespace lockstep::parallel {
namespace {

constexpr std::ptrdiff_t kPrint = 16;  // digits of a fingerprint

}  // namespace

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
  compare();
  lanes_->start_changed = std::ranges::find(changed_, 1) != changed_.end();
  lanes_->changed.assign(buffers_.size(), false);
  lanes_->under_way = true;
  lanes_->start.clear();
  for (const auto& item : buffers_) lanes_->start.push_back(own_elements(item.tensor).clone());
}

void BufferSync::begin_lane() {
  const at::NoGradGuard no_grad;
  lanes_->under_way = true;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (lanes_->changed[i]) write(i, lanes_->start[i]);
  }
}

// After compare(). A step may begin with others than the last one left, and a lane lead from those
// to just these: num_batches_tracked of a checkpoint that is one step old.
bool BufferSync::is_changed_in_lane(size_t buffer) const {
  return changed_[buffer] ||
         (lanes_->start_changed && !same_bytes(buffers_[buffer].tensor, lanes_->start[buffer]));
}

// A buffer that this lane did not change counts as changed where an earlier lane changed it: that
// costs a copy and changes no bit.
void BufferSync::end_lane(int64_t own_lane) {
  const at::NoGradGuard no_grad;
  if (buffers_.empty()) return;
  compare();
  for (size_t i = 0; i < buffers_.size(); ++i) {
    lanes_->changed[i] = lanes_->changed[i] || is_changed_in_lane(i);
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

void BufferSync::abandon_lanes() {
  if (!std::exchange(lanes_->under_way, false)) return;
  const at::NoGradGuard no_grad;
  compare();  // the lane that a loop is in
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (lanes_->changed[i] || is_changed_in_lane(i)) write(i, lanes_->start[i]);
  }
}

void BufferSync::check_start(std::string_view address) {
  std::string mine;
  for (const auto& start : lanes_->start) mine += fmt::format("{:016x}", fingerprint(start));
  const auto all = group_.all_gather_bytes(mine, {.label = "buffers: how the step began"});
  for (size_t rank = 1; rank < all.size(); ++rank) {
    const auto other = std::ranges::mismatch(all[0], all[rank]).in1;
    if (other == all[0].end()) continue;
    abandon_lanes();
    throw ConfigError(fmt::format(
        "[{}] buffer '{}' was another one on rank {} than on rank 0 when the lanes of this step "
        "began: what changes it between steps has to do so in the same way on all ranks. Where the "
        "lanes of "
        "another model's loop run this one, which the loop does not name, set eval() for that",
        address, buffers_[(other - all[0].begin()) / kPrint].name, rank));
  }
}

void BufferSync::finish_lanes(const std::vector<double>& shares) {
  const at::NoGradGuard no_grad;
  lanes_->under_way = false;
  if (std::ranges::none_of(shares, [](double share) { return share > 0; })) return;
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
