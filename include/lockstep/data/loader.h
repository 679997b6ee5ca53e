// Batches of this rank's samples, epoch by epoch.
#pragma once

#include <c10/core/Device.h>

#include <concepts>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/core/shard.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/sampler.h"
#include "lockstep/data/steps.h"
#include "lockstep/data/torch_dataset.h"
#include "lockstep/data/transform.h"

namespace lockstep::data {

// How a Loader divides, orders and makes batches.
struct LoaderOptions {
  // Samples per rank and step; all ranks together take size() times as many. With lanes: per lane.
  int64_t batch_size = 64;
  // The order depends on (seed, epoch) and the number of samples alone. The same on all ranks: with
  // others samples come twice, and others not at all. Ddp and Fsdp compare them (SamplerOptions).
  int64_t seed = 0;
  bool shuffle = true;
  // What to do when the data are not a multiple of the global batch. With neither of the two: the
  // last batch is short, and the first samples come again where ranks would differ, so that all
  // ranks have the same number of batches.
  bool drop_last = false;  // leave the rest out: full batches only, no sample twice
  bool exact = false;  // every sample once: ranks may differ by a sample, and so by a last batch.
                       // For evaluation
  // How many batches background threads make ahead; 0: each is made when it is asked for, or, where
  // `workers` is set, two for each of them. Data in memory is quicker without: a batch of 64
  // Fashion-MNIST images takes 15 us to make and one of 32 scalars 0.2 us, while handing one over
  // takes 4 us and the thread takes a core from the ranks. Worth it when a batch costs far more, as
  // with files or heavy transforms, and there are cores to spare.
  int64_t prefetch = 0;
  // How many threads make them; 0: one where `prefetch` is set. Batches are the same, in the same
  // order, for every number of threads. With several, the data set and the transforms are called by
  // all of them at once. They have all signals blocked but those of their own faults, and so has a
  // process that the data set starts there: SIGTERM does not end it unless posix_spawn() was given
  // another mask (POSIX_SPAWN_SETSIGMASK). Debian's sh, which popen() starts, clears its mask.
  int64_t workers = 0;
  // Applied to each batch in this order, outside of autograd, Autocast and InferenceMode; on the
  // background threads when there are any.
  std::vector<Transform> transforms = {};
  // The device on which the loop gets its batches, for instance world.device(); as the data set and
  // the transforms made them when not given. On CUDA they go through pinned memory and the copy is
  // asynchronous: it runs on the stream that is current in the loop.
  std::optional<at::Device> device = std::nullopt;
  // A step's batch is cut into this many lanes on any number of ranks, which is at most that: lane
  // l has the samples that rank l of as many ranks would have, and rank r of W runs lanes Shard{r,
  // W}.of(lanes). The loop is then over steps() (lockstep/parallel/lanes.h). 0: without.
  int64_t lanes = 0;
};

// for (auto [x, y] : loader.epoch(e)) ...
//
// Batch k of rank r holds samples [k * batch_size, (k + 1) * batch_size) of DistributedSampler's
// for that rank. Memory of a batch that is no longer referred to is used again for a later one.
//
// What the data set or a transform throws comes out of the loop as DataError that names rank,
// epoch, batch and the sample that cannot be read (or, when it is not one sample's fault, the
// batch's samples); a batch that does not have as many samples as it should is such an error, too.
// A loop that continues nevertheless gets the same error again, so that no rank skips a batch which
// the others have. A new epoch() works.
//
// A loader and its epochs belong to one thread.
class Loader {
 public:
  class Epoch;

  // Refers to `dataset`, which must outlive loader and epochs. Throws ConfigError when the data set
  // is empty, an option is impossible, or drop_last leaves no batch. Makes no collective call.
  Loader(const Dataset& dataset, const comm::World& world, LoaderOptions options = {});
  // As above, for rank part.index of part.count.
  Loader(const Dataset& dataset, Shard part, LoaderOptions options = {});

  // As above, keeping the data set.
  Loader(std::shared_ptr<const Dataset> dataset, const comm::World& world,
         LoaderOptions options = {});
  Loader(std::shared_ptr<const Dataset> dataset, Shard part, LoaderOptions options = {});
  template <std::derived_from<Dataset> D>
  Loader(D&& temporary, const comm::World& world, LoaderOptions options = {})
      : Loader(std::make_shared<const D>(std::move(temporary)), world, std::move(options)) {}
  template <std::derived_from<Dataset> D>
  Loader(D&& temporary, Shard part, LoaderOptions options = {})
      : Loader(std::make_shared<const D>(std::move(temporary)), part, std::move(options)) {}
  // As above, for a data set of libtorch's (lockstep/data/torch_dataset.h):
  // Loader(set.map(Stack<>()), world).
  template <AnyTorchDataset D>
  Loader(D set, const comm::World& world, LoaderOptions options = {})
      : Loader(from_torch(std::move(set)), world, std::move(options)) {}
  template <AnyTorchDataset D>
  Loader(D set, Shard part, LoaderOptions options = {})
      : Loader(from_torch(std::move(set)), part, std::move(options)) {}

  // Batches of a whole epoch on this rank; with lanes, steps.
  int64_t batches() const;
  // Those of state().epoch that come after state().position.
  int64_t batches_left() const;

  // The epoch's batches, to be gone through once: from its beginning, or, for the epoch of a
  // restored state, once from the saved position. May outlive the loader. Throws ConfigError for a
  // negative epoch, and when the data set's size() has changed.
  Epoch epoch(int64_t epoch);

  // As epoch(), for a loader with lanes: there epoch() throws ConfigError, as this does without
  // lanes. Each step has a batch for each lane of this rank.
  Steps steps(int64_t epoch);

  // The loop's position in the data: the batch that it works on counts as taken, so save after the
  // optimizer's step. After the last batch's body: the beginning of the next epoch. After an error:
  // after the last batch that the loop was given. Of two epochs that are iterated at the same time:
  // the position of the one that advanced last.
  SamplerState state() const;

  // The next epoch(state.epoch) resumes from there, on any number of ranks and with any batch size.
  // Throws ConfigError for a state of another seed, number of samples or shuffle, and then changes
  // nothing. At the beginning of an epoch the number of samples may be another one.
  void restore(const SamplerState& state);
  // Throws what restore() would throw for this state.
  void check(const SamplerState& state) const;

 private:
  friend class StepCursor;
  struct Shared;
  // Returns how many batches the epoch still has.
  int64_t begin(int64_t epoch);

  std::shared_ptr<Shared> shared_;
};

// The batches of one epoch, as a range for one loop.
class Loader::Epoch {
  struct Cursor;

 public:
  // An input iterator: one pass, in one thread.
  class Iterator {
   public:
    // What std::input_iterator asks for.
    using iterator_concept = std::input_iterator_tag;
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;

    const Batch& operator*() const;  // throws what ++ or begin() threw
    // Makes or fetches the next batch, as begin() does the first, and throws what goes wrong;
    // ConfigError past the end.
    Iterator& operator++();
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const;

   private:
    friend class Epoch;
    explicit Iterator(Cursor* cursor) : cursor_(cursor) {}
    Cursor* cursor_;
  };

  Epoch(Epoch&&) noexcept;
  ~Epoch();  // leaves unread batches; waits for those that background threads are making

  // Batches still to come.
  int64_t batches() const;

  // Call begin() once.
  Iterator begin();
  std::default_sentinel_t end() const { return {}; }

 private:
  friend class Loader;
  explicit Epoch(std::unique_ptr<Cursor> cursor);
  std::unique_ptr<Cursor> cursor_;
};

}  // namespace lockstep::data

namespace lockstep {
using data::Loader;
using data::LoaderOptions;
}  // namespace lockstep
