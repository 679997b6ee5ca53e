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

// The iterator stays at the step's last batch: the loader's state is then that behind the step.
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

MicroBatches* Feed::next() {
  if (epoch_) {
    take_batches();
    return now_.batches.empty() ? nullptr : &now_;
  }
  now_.lanes.reset();
  if (!step_) {
    step_.emplace(steps_->begin());
  } else {
    ++*step_;
  }
  if (*step_ == std::default_sentinel) return nullptr;
  now_.lanes.emplace(**step_);
  return &now_;
}

}  // namespace lockstep::train
