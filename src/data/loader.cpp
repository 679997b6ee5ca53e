#include "lockstep/data/loader.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "data/batch_maker.h"
#include "data/prefetcher.h"
#include "lockstep/core/error.h"
#include "lockstep/core/flight.h"

namespace lockstep::data {
namespace {

int64_t batches_of(int64_t samples, const LoaderOptions& options) {
  const int64_t full = samples / options.batch_size;
  const bool has_rest = samples % options.batch_size != 0;
  return full + (has_rest && !options.drop_last ? 1 : 0);
}

void check(int64_t samples, const LoaderOptions& options) {
  if (options.batch_size < 1 || options.prefetch < 0) {
    throw ConfigError(
        fmt::format("[loader] batch_size {} and prefetch {}: need at least 1 and at least 0",
                    options.batch_size, options.prefetch));
  }
  if (samples < 1) {
    throw ConfigError(fmt::format(
        "[loader] the data set has {} samples: nothing to train on; check its path and filters",
        samples));
  }
  for (size_t t = 0; t < options.transforms.size(); ++t) {
    if (!options.transforms[t]) throw ConfigError(fmt::format("[loader] transform {} is empty", t));
  }
}

}  // namespace

// What the loader and its epochs have in common.
struct Loader::Shared {
  const Dataset& dataset;
  Shard part;
  LoaderOptions options;
  DistributedSampler sampler;
  SamplerState state = {};
  std::optional<SamplerState> restored = std::nullopt;
};

// One pass through an epoch.
struct Loader::Epoch::Cursor {
  Cursor(std::shared_ptr<Shared> loader, int64_t count)
      : shared(std::move(loader)),
        sampler(shared->sampler),
        maker(shared->dataset, shared->options.transforms, sampler, shared->part,
              shared->options.batch_size, count) {
    if (shared->options.prefetch > 0 && count > 0) ahead.emplace(maker, shared->options.prefetch);
  }

  bool done() const { return taken > maker.count(); }

  void take_next() {
    const flight::Span busy(flight::Activity::Data);
    if (taken++ == maker.count()) {
      shared->state = {sampler.state().epoch + 1, 0};
      current = {};
      return;
    }
    Batch spare = may_reuse() ? std::exchange(current, {}) : Batch{};
    current = ahead ? ahead->next(std::move(spare)) : maker.make(taken - 1, std::move(spare));
    sampler.advance(shared->options.batch_size);
    shared->state = sampler.state();
  }

  // A transform's tensors may live in memory that is not the data set's to overwrite.
  bool may_reuse() const { return shared->options.transforms.empty(); }

  std::shared_ptr<Shared> shared;
  DistributedSampler sampler;  // stands behind the batch in the loop's hands
  BatchMaker maker;
  std::optional<Prefetcher> ahead;
  Batch current;
  int64_t taken = 0;  // how often take_next() was called
};

Loader::Loader(const Dataset& dataset, const comm::World& world, LoaderOptions options)
    : Loader(dataset, Shard{world.rank(), world.size()}, std::move(options)) {}

Loader::Loader(const Dataset& dataset, Shard part, LoaderOptions options) {
  const int64_t samples = dataset.size();
  check(samples, options);
  const DistributedSampler sampler(samples, part,
                                   {.seed = options.seed,
                                    .shuffle = options.shuffle,
                                    .drop_last = options.drop_last,
                                    .exact = options.exact});
  shared_ = std::make_shared<Shared>(Shared{dataset, part, std::move(options), sampler});
  if (batches() == 0 && shared_->options.drop_last) {
    throw ConfigError(fmt::format(
        "[loader] batch_size {} on {} ranks needs {} samples, the data set has {}, and drop_last "
        "leaves none: lower batch_size or do not set drop_last",
        shared_->options.batch_size, part.count, shared_->options.batch_size * part.count,
        samples));
  }
}

int64_t Loader::batches() const {
  DistributedSampler whole = shared_->sampler;
  whole.set_epoch(whole.state().epoch);
  return batches_of(whole.size(), shared_->options);
}

Loader::Epoch Loader::epoch(int64_t epoch) {
  Shared& shared = *shared_;
  shared.sampler.set_epoch(epoch);
  if (shared.restored && shared.restored->epoch == epoch) {
    shared.sampler.restore(*std::exchange(shared.restored, std::nullopt));
  }
  shared.state = shared.sampler.state();
  return Epoch(
      std::make_unique<Epoch::Cursor>(shared_, batches_of(shared.sampler.size(), shared.options)));
}

SamplerState Loader::state() const { return shared_->state; }

void Loader::restore(const SamplerState& state) {
  DistributedSampler(shared_->sampler).restore(state);
  shared_->restored = state;
  shared_->state = state;
}

Loader::Epoch::Epoch(std::unique_ptr<Cursor> cursor) : cursor_(std::move(cursor)) {}
Loader::Epoch::Epoch(Epoch&&) noexcept = default;
Loader::Epoch::~Epoch() = default;

int64_t Loader::Epoch::batches() const {
  return std::max<int64_t>(0, cursor_->maker.count() - cursor_->taken);
}

Loader::Epoch::Iterator Loader::Epoch::begin() {
  if (cursor_->taken > 0) {
    throw ConfigError("[loader] an epoch can be gone through once: call epoch() again");
  }
  cursor_->take_next();
  return Iterator(cursor_.get());
}

const Batch& Loader::Epoch::Iterator::operator*() const { return cursor_->current; }

Loader::Epoch::Iterator& Loader::Epoch::Iterator::operator++() {
  cursor_->take_next();
  return *this;
}

bool Loader::Epoch::Iterator::operator==(std::default_sentinel_t) const { return cursor_->done(); }

}  // namespace lockstep::data
