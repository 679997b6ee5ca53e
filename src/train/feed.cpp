#include "train/feed.h"

#include <algorithm>
#include <iterator>

namespace lockstep::train {

Feed::Feed(data::Loader& loader, int64_t lanes, int64_t epoch, int64_t accumulation)
    : accumulation_(accumulation) {
  if (lanes > 0) {
    steps_.emplace(loader.steps(epoch));
  } else {
    epoch_.emplace(loader.epoch(epoch));
  }
}

// The iterator stays at the step's last batch: the loader's state is then that after the step.
void Feed::take_batches() {
  now_.batches.clear();
  if (!batch_) {
    batch_.emplace(epoch_->begin());
  } else {
    ++*batch_;
  }
  if (*batch_ == std::default_sentinel) return;
  now_.batches.push_back(**batch_);
  const int64_t more = std::min(accumulation_ - 1, epoch_->batches());
  for (int64_t i = 0; i < more; ++i) {
    ++*batch_;
    now_.batches.push_back(**batch_);
  }
}

void Feed::take_lanes() {
  now_.lanes.reset();
  now_.before.clear();
  if (!step_) {
    step_.emplace(steps_->begin());
  } else {
    ++*step_;
  }
  if (*step_ == std::default_sentinel) return;
  const int64_t more = std::min(accumulation_ - 1, steps_->size());
  for (int64_t i = 0; i < more; ++i) {
    const data::Step step = **step_;
    auto& batches = now_.before.emplace_back();
    for (int64_t lane = step.lanes().begin; lane < step.lanes().end; ++lane) {
      batches.push_back(step.batch(lane));
    }
    ++*step_;
  }
  now_.lanes.emplace(**step_);
}

MicroBatches* Feed::next() {
  if (epoch_) {
    take_batches();
    return now_.batches.empty() ? nullptr : &now_;
  }
  take_lanes();
  return now_.lanes ? &now_ : nullptr;
}

std::vector<data::Batch> MicroBatches::of_lane(int64_t own_lane, const data::Batch& last) const {
  std::vector<data::Batch> all;
  for (const auto& micro : before) all.push_back(micro[static_cast<size_t>(own_lane)]);
  all.push_back(last);
  return all;
}

}  // namespace lockstep::train
