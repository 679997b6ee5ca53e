#include "lockstep/data/loader.h"

#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <optional>
#include <system_error>
#include <utility>

#include "data/loader/ahead.h"
#include "data/loader/batch_maker.h"
#include "data/loader/divided_order.h"
#include "data/loader/loader_shared.h"
#include "data/loader/step_cursor.h"
#include "lockstep/core/error.h"
#include "lockstep/core/flight.h"

namespace lockstep::data {
namespace {

int64_t batches_of(int64_t samples, const LoaderOptions& options) {
  const int64_t full = samples / options.batch_size;
  const bool has_rest = samples % options.batch_size != 0;
  return full + (has_rest && !options.drop_last ? 1 : 0);
}

void check_options(int64_t samples, const LoaderOptions& options) {
  if (options.batch_size < 1 || options.prefetch < 0 || options.workers < 0) {
    throw ConfigError(
        fmt::format("[loader] batch_size {}, prefetch {} and workers {}: need at least 1, 0 and 0",
                    options.batch_size, options.prefetch, options.workers));
  }
  if (options.lanes < 0) {
    throw ConfigError(fmt::format("[loader] lanes = {}: a number of lanes, or 0", options.lanes));
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

// A data set that the caller keeps.
std::shared_ptr<const Dataset> refer_to(const Dataset& dataset) {
  return {std::shared_ptr<const Dataset>(), &dataset};
}

at::Tensor on_device_of(const at::Tensor& tensor, const LoaderOptions& options) {
  if (!options.device || !tensor.defined() || tensor.device() == *options.device) return tensor;
  // From pinned memory a copy to CUDA does not hold up the host; libtorch keeps that memory until
  // the copy is over. Other devices would read our memory after it serves for another batch.
  if (!options.device->is_cuda() || !tensor.is_cpu()) return tensor.to(*options.device);
  // What came pinned is the data set's, which may write another batch into it.
  const at::Tensor pinned = tensor.pin_memory();
  return pinned.to(*options.device, /*non_blocking=*/!pinned.is_same(tensor));
}

// The part that the sampler deals to: a rank, or with lanes the first that this rank runs.
Shard part_of(Shard rank, const LoaderOptions& options) {
  if (options.lanes == 0) return rank;
  if (options.lanes < rank.count) {
    throw ConfigError(
        fmt::format("[loader] lanes = {} on {} ranks: each needs one, so run at most as "
                    "many ranks as there are lanes",
                    options.lanes, rank.count));
  }
  if (options.exact) {
    throw ConfigError(
        "[loader] exact gives lanes different numbers of batches: set either lanes or exact, and "
        "evaluate with a loader without lanes");
  }
  return {rank.of(options.lanes).begin, options.lanes};
}

}  // namespace

AheadPlan plan_of(int64_t count, const LoaderOptions& options) {
  const int64_t workers = std::min(options.workers, count);
  const int64_t depth = options.prefetch > 0 ? options.prefetch : 2 * workers;
  return {count, std::min(depth, count), std::max<int64_t>(workers, 1)};
}

std::shared_ptr<Ahead<Batch>> start_ahead(Ahead<Batch>::Make make, const AheadPlan& plan) {
  try {
    return not_for_children(std::make_shared<Ahead<Batch>>(std::move(make), plan));
  } catch (const std::system_error& refused) {
    throw Error(fmt::format("[loader] cannot start {} threads: {}; lower workers", plan.threads,
                            refused.code().message()));
  }
}

ThreadSettings::ThreadSettings() {
  for (const auto type : {at::kCUDA, at::kPrivateUse1}) {
    const bool is_there = type == at::kCUDA ? at::hasCUDA() : c10::impl::hasDeviceGuardImpl(type);
    if (is_there) current_.push_back(c10::impl::VirtualGuardImpl(type).getDevice());
  }
}

void ThreadSettings::apply() const {
  // A new thread's operators would take all cores: it learns here what this rank's share is.
  at::internal::lazy_init_num_threads();
  for (const auto device : current_) {
    c10::impl::VirtualGuardImpl(device.type()).uncheckedSetDevice(device);
  }
}

Batch on_device(const Batch& batch, const LoaderOptions& options) {
  return {on_device_of(batch.data, options), on_device_of(batch.target, options)};
}

// One pass through an epoch.
struct Loader::Epoch::Cursor {
  Cursor(std::shared_ptr<Shared> loader, int64_t count)
      : shared(std::move(loader)),
        sampler(shared->sampler),
        maker(*shared->dataset, shared->options.transforms, sampler,
              fmt::format("rank {} of {}", shared->part.index, shared->part.count),
              shared->options.batch_size, count) {
    const AheadPlan plan = plan_of(count, shared->options);
    if (plan.depth == 0 || count == 0) return;
    const auto make = [this, settings = ThreadSettings()](int64_t number,
                                                          std::optional<Batch> spare) {
      settings.apply();
      return maker.make(number, std::move(spare).value_or(Batch{}));
    };
    ahead = start_ahead(make, plan);
  }

  bool done() const { return taken > maker.count(); }

  void take_next() {
    const flight::Span busy(flight::Activity::Data);
    if (error) std::rethrow_exception(error);
    if (done()) throw ConfigError(kPastEnd);
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
      current = on_device(made, shared->options);
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
  DistributedSampler sampler;  // stands after the batch in the loop's hands
  BatchMaker maker;
  Batch made;
  Batch current;             // the same, where the loop wants it
  int64_t taken = 0;         // batches that the loop had, and one more when it has seen the end
  std::exception_ptr error;  // of the batch after them
  std::shared_ptr<Ahead<Batch>> ahead;  // last: its threads use the maker
};

Loader::Loader(const Dataset& dataset, const comm::World& world, LoaderOptions options)
    : Loader(refer_to(dataset), world, std::move(options)) {}

Loader::Loader(const Dataset& dataset, Shard part, LoaderOptions options)
    : Loader(refer_to(dataset), part, std::move(options)) {}

Loader::Loader(std::shared_ptr<const Dataset> dataset, const comm::World& world,
               LoaderOptions options)
    : Loader(std::move(dataset), Shard{world.rank(), world.size()}, std::move(options)) {}

Loader::Loader(std::shared_ptr<const Dataset> dataset, Shard rank, LoaderOptions options) {
  if (dataset == nullptr) throw ConfigError("[loader] the data set is a null pointer");
  const int64_t samples = dataset->size();
  check_options(samples, options);
  const Shard part = part_of(rank, options);
  const DistributedSampler sampler(samples, part,
                                   {.seed = options.seed,
                                    .shuffle = options.shuffle,
                                    .drop_last = options.drop_last,
                                    .exact = options.exact});
  shared_ = std::make_shared<Shared>(
      Shared{std::move(dataset), part, std::move(options), sampler, sampler.state()});
  if (shared_->options.lanes > 0) shared_->lanes = rank.of(shared_->options.lanes);
  if (batches() == 0 && shared_->options.drop_last) {
    int64_t needed = 0;  // 2^63 - 1 stands for all samples at once
    if (__builtin_mul_overflow(shared_->options.batch_size, part.count, &needed)) {
      needed = std::numeric_limits<int64_t>::max();
    }
    throw ConfigError(fmt::format(
        "[loader] batch_size {} on {} {} needs {} samples, the data set has {}, and drop_last "
        "leaves none: lower batch_size or do not set drop_last",
        shared_->options.batch_size, part.count, shared_->options.lanes > 0 ? "lanes" : "ranks",
        needed, samples));
  }
}

int64_t Loader::batches() const {
  DistributedSampler whole = shared_->sampler;
  whole.set_epoch(whole.state().epoch);
  return batches_of(whole.size(), shared_->options);
}

int64_t Loader::batches_left() const {
  // In the place of the epoch's order, whose shuffle would be for nothing.
  const SamplerState& state = shared_->state;
  const LoaderOptions& options = shared_->options;
  DistributedSampler rest(
      state.length, shared_->part,
      {.shuffle = false, .drop_last = options.drop_last, .exact = options.exact});
  rest.restore({.position = state.position, .length = state.length, .shuffle = false});
  return batches_of(rest.size(), options);
}

int64_t Loader::begin(int64_t epoch) {
  Shared& shared = *shared_;
  if (const int64_t now = shared.dataset->size(); now != shared.sampler.state().length) {
    throw ConfigError(fmt::format(
        "[loader] the data set has {} samples, and had {} when the loader was made: make another "
        "loader of it, and restore() this one's state there at the beginning of an epoch",
        now, shared.sampler.state().length));
  }
  shared.sampler.set_epoch(epoch);
  if (shared.restored && shared.restored->epoch == epoch) {
    shared.sampler.restore(*std::exchange(shared.restored, std::nullopt));
  }
  shared.state = shared.sampler.state();
  note_order(shared.state, shared.part);
  return batches_of(shared.sampler.size(), shared.options);
}

Loader::Epoch Loader::epoch(int64_t epoch) {
  if (shared_->options.lanes > 0) {
    throw ConfigError(fmt::format(
        "[loader] a loader with lanes = {} has a batch for each lane of a step: for (auto step : "
        "loader.steps(epoch)) for (auto [x, y] : ddp.lanes(step)) ...",
        shared_->options.lanes));
  }
  const int64_t count = begin(epoch);
  return Epoch(std::make_unique<Epoch::Cursor>(shared_, count));
}

Steps Loader::steps(int64_t epoch) {
  if (shared_->options.lanes == 0) {
    throw ConfigError(
        "[loader] steps() is for a loader with lanes: set LoaderOptions::lanes, or loop over "
        "epoch()");
  }
  const int64_t count = begin(epoch);
  return Steps(std::make_unique<StepCursor>(shared_, count));
}

SamplerState Loader::state() const { return shared_->state; }

void Loader::restore(const SamplerState& state) {
  DistributedSampler restored = shared_->sampler;
  restored.restore(state);
  shared_->sampler = restored;  // so that the epoch is shuffled once
  shared_->restored = shared_->state = restored.state();
}

void Loader::check(const SamplerState& state) const { shared_->sampler.check(state); }

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
