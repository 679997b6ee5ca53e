#include "lockstep/data/loader.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <system_error>
#include <utility>

#include "data/ahead.h"
#include "data/batch_maker.h"
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
  if (options.batch_size < 1 || options.prefetch < 0 || options.workers < 0) {
    throw ConfigError(
        fmt::format("[loader] batch_size {}, prefetch {} and workers {}: need at least 1, 0 and 0",
                    options.batch_size, options.prefetch, options.workers));
  }
  if (samples < 1) {
    throw ConfigError(fmt::format(
        "[loader] the data set has {} samples: nothing to train on; check its path and filters",
        samples));
  }
  for (size_t t = 0; t < options.transforms.size(); ++t) {
    if (options.transforms[t].empty()) {
      throw ConfigError(fmt::format("[loader] transform {} is empty", t));
    }
  }
}

// Threads that make batches ahead, or none.
AheadPlan plan_of(int64_t count, const LoaderOptions& options) {
  const int64_t depth = options.prefetch > 0 ? options.prefetch : 2 * options.workers;
  return {count, depth, std::max<int64_t>(options.workers, 1)};
}

// A data set that the caller keeps.
std::shared_ptr<const Dataset> refer_to(const Dataset& dataset) {
  return {std::shared_ptr<const Dataset>(), &dataset};
}

// A new thread's operators would take all cores: it learns here what this rank's share is.
Batch make_in_thread(const BatchMaker& maker, int64_t number, std::optional<Batch> spare) {
  at::internal::lazy_init_num_threads();
  return maker.make(number, std::move(spare).value_or(Batch{}));
}

at::Tensor on_device(const at::Tensor& tensor, const LoaderOptions& options) {
  if (!options.device || !tensor.defined() || tensor.device() == *options.device) return tensor;
  // From pinned memory a copy to CUDA does not hold up the host; libtorch keeps that memory until
  // the copy is over. Other devices would read our memory after it serves for another batch.
  if (!options.device->is_cuda() || !tensor.is_cpu()) return tensor.to(*options.device);
  return tensor.pin_memory().to(*options.device, /*non_blocking=*/true);
}

}  // namespace

// What the loader and its epochs have in common.
struct Loader::Shared {
  std::shared_ptr<const Dataset> dataset;
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
        maker(*shared->dataset, shared->options.transforms, sampler, shared->part,
              shared->options.batch_size, count) {
    const AheadPlan plan = plan_of(count, shared->options);
    if (plan.depth == 0 || count == 0) return;
    const auto make = [this](int64_t number, std::optional<Batch> spare) {
      return make_in_thread(maker, number, std::move(spare));
    };
    try {
      ahead.emplace(make, plan);
    } catch (const std::system_error& refused) {
      throw Error(fmt::format("[loader] cannot start {} threads: {}; lower workers", plan.threads,
                              refused.what()));
    }
  }

  bool done() const { return taken > maker.count(); }

  void take_next() {
    const flight::Span busy(flight::Activity::Data);
    if (error) std::rethrow_exception(error);
    if (taken == maker.count()) {
      ++taken;
      shared->state.epoch = sampler.state().epoch + 1;
      shared->state.position = 0;
      current = made = {};
      return;
    }
    try {
      current = {};
      made = next();
      current = {on_device(made.data, shared->options), on_device(made.target, shared->options)};
    } catch (...) {
      error = std::current_exception();
      throw;
    }
    ++taken;
    sampler.advance(shared->options.batch_size);
    shared->state = sampler.state();
  }

  Batch next() {
    std::optional<Batch> spare;
    // A transform's tensors may live in memory that is not the data set's to overwrite.
    if (shared->options.transforms.empty() && made.data.defined()) {
      spare = std::exchange(made, {});
    }
    if (ahead) return ahead->next(std::move(spare));
    return maker.make(taken, std::move(spare).value_or(Batch{}));
  }

  std::shared_ptr<Shared> shared;
  DistributedSampler sampler;  // stands behind the batch in the loop's hands
  BatchMaker maker;
  Batch made;
  Batch current;             // the same, where the loop wants it
  int64_t taken = 0;         // batches that the loop had, and one more when it has heard of the end
  std::exception_ptr error;  // of the batch behind them
  std::optional<Ahead<Batch>> ahead;  // last: its threads use the maker
};

Loader::Loader(const Dataset& dataset, const comm::World& world, LoaderOptions options)
    : Loader(refer_to(dataset), world, std::move(options)) {}

Loader::Loader(const Dataset& dataset, Shard part, LoaderOptions options)
    : Loader(refer_to(dataset), part, std::move(options)) {}

Loader::Loader(std::shared_ptr<const Dataset> dataset, const comm::World& world,
               LoaderOptions options)
    : Loader(std::move(dataset), Shard{world.rank(), world.size()}, std::move(options)) {}

Loader::Loader(std::shared_ptr<const Dataset> dataset, Shard part, LoaderOptions options) {
  const int64_t samples = dataset->size();
  check(samples, options);
  const DistributedSampler sampler(samples, part,
                                   {.seed = options.seed,
                                    .shuffle = options.shuffle,
                                    .drop_last = options.drop_last,
                                    .exact = options.exact});
  shared_ = std::make_shared<Shared>(
      Shared{std::move(dataset), part, std::move(options), sampler, sampler.state()});
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

const Batch& Loader::Epoch::Iterator::operator*() const {
  if (cursor_->error) std::rethrow_exception(cursor_->error);
  return cursor_->current;
}

Loader::Epoch::Iterator& Loader::Epoch::Iterator::operator++() {
  cursor_->take_next();
  return *this;
}

bool Loader::Epoch::Iterator::operator==(std::default_sentinel_t) const { return cursor_->done(); }

}  // namespace lockstep::data
