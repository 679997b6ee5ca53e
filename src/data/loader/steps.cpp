#include "lockstep/data/steps.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/hash/mix.h"
#include "data/loader/step_cursor.h"
#include "lockstep/core/error.h"
#include "lockstep/core/flight.h"

namespace lockstep::data {

StepCursor::StepCursor(std::shared_ptr<Loader::Shared> loader, int64_t count)
    : shared_(std::move(loader)),
      sampler_(shared_->sampler),
      count_(count),
      before_(sampler_.state()) {
  const int64_t lanes = shared_->options.lanes;
  for (int64_t lane = shared_->lanes.begin; lane < shared_->lanes.end; ++lane) {
    makers_.emplace_back(*shared_->dataset, shared_->options.transforms, sampler_.of_part(lane),
                         fmt::format("lane {} of {}", lane, lanes), shared_->options.batch_size,
                         count_);
  }
  // References into these stay valid while the step's further lanes are fetched.
  made_.reserve(makers_.size());
  current_.reserve(makers_.size());
  const AheadPlan plan = plan_of(count_ * own_lanes(), shared_->options);
  if (plan.depth == 0 || plan.count == 0) return;
  ahead_ = start_ahead(
      [this, settings = ThreadSettings()](int64_t number, std::optional<Batch> spare) {
        settings.apply();
        return make(number, std::move(spare));
      },
      plan);
}

int64_t StepCursor::lane_count() const { return shared_->options.lanes; }
Range StepCursor::lanes() const { return shared_->lanes; }

Batch StepCursor::make(int64_t number, std::optional<Batch> spare) const {
  return makers_[number % own_lanes()].make(number / own_lanes(),
                                            std::move(spare).value_or(Batch{}));
}

Batch StepCursor::next() {
  std::optional<Batch> spare;
  if (!spares_.empty()) {
    spare = std::move(spares_.back());
    spares_.pop_back();
  }
  if (ahead_) return ahead_->next(std::move(spare));
  return make((taken_ - 1) * own_lanes() + static_cast<int64_t>(made_.size()), std::move(spare));
}

void StepCursor::fetch() {
  const flight::Span busy(flight::Activity::Data);
  rethrow();
  try {
    made_.push_back(next());
    current_.push_back(on_device(made_.back(), shared_->options));
  } catch (...) {
    error_ = std::current_exception();
    shared_->state = before_;
    throw;
  }
}

void StepCursor::take_next() {
  rethrow();
  if (done()) throw ConfigError(kPastEnd);
  // Of lanes that the loop has left out.
  while (ahead_ && taken_ > 0 && static_cast<int64_t>(made_.size()) < own_lanes()) fetch();
  current_.clear();
  // A transform's tensors may live in memory that is not the data set's to overwrite.
  if (shared_->options.transforms.empty()) {
    std::move(made_.begin(), made_.end(), std::back_inserter(spares_));
  }
  made_.clear();
  ++taken_;
  keys_ = 0;
  before_ = sampler_.state();
  if (taken_ > count_) {
    shared_->state.epoch = before_.epoch + 1;
    shared_->state.position = 0;
    spares_.clear();
    return;
  }
  fetch();
  sampler_.advance(shared_->options.batch_size);
  shared_->state = sampler_.state();
}

const Batch& StepCursor::batch(int64_t lane) {
  const int64_t own = lane - lanes().begin;
  if (own < 0 || own >= own_lanes()) {
    throw ConfigError(fmt::format("[loader] lane {}: this rank runs lanes {} to {} of {}", lane,
                                  lanes().begin, lanes().end - 1, lane_count()));
  }
  while (static_cast<int64_t>(current_.size()) <= own) fetch();
  return current_[own];
}

StepKey StepCursor::next_key() {
  const uint64_t epoch =
      mix(mix(static_cast<uint64_t>(before_.seed)) ^ static_cast<uint64_t>(before_.epoch));
  return {.seed = mix(epoch ^ static_cast<uint64_t>(keys_++)), .step = before_.position};
}

StepCursor& Step::cursor() const {
  if (cursor_->taken() == number_) return *cursor_;
  throw ConfigError("[loader] this step is over: use a step within its turn of the loop only");
}

int64_t Step::lane_count() const { return cursor().lane_count(); }
Range Step::lanes() const { return cursor().lanes(); }
const Batch& Step::batch(int64_t lane) const { return cursor().batch(lane); }
StepKey Step::next_key() const { return cursor().next_key(); }

Steps::Steps(std::unique_ptr<StepCursor> cursor) : cursor_(std::move(cursor)) {}
Steps::Steps(Steps&&) noexcept = default;
Steps::~Steps() = default;

int64_t Steps::size() const { return std::max<int64_t>(0, cursor_->count() - cursor_->taken()); }

Steps::Iterator Steps::begin() {
  if (cursor_->has_begun()) {
    throw ConfigError("[loader] an epoch can be gone through once: call steps() again");
  }
  cursor_->take_next();
  return Iterator(cursor_.get());
}

Step Steps::Iterator::operator*() const {
  cursor_->rethrow();
  return {cursor_, cursor_->taken()};
}

Steps::Iterator& Steps::Iterator::operator++() {
  cursor_->take_next();
  return *this;
}

bool Steps::Iterator::operator==(std::default_sentinel_t) const { return cursor_->done(); }

}  // namespace lockstep::data
