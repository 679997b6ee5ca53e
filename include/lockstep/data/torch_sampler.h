// A sampler for torch::data::make_data_loader.
#pragma once

#include <torch/data/samplers/base.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/core/shard.h"
#include "lockstep/data/sampler.h"

namespace lockstep::data {

// DistributedSampler's samples for libtorch's own data loader. Each pass over the loader is another
// epoch: 0, 1, 2, ... from construction, set_epoch() or restore() on. (libtorch's
// DistributedRandomSampler repeats one order in every epoch: the data loader keeps a copy, which
// set_epoch() of the original does not reach. Copies of this one share their state.)
//
//   lockstep::data::TorchSampler sampler(*set.size(), world, {.seed = 1});
//   auto loader = torch::data::make_data_loader(set, sampler, 64);
//   for (int64_t epoch = 0; epoch < 10; ++epoch)
//     for (auto& batch : *loader) ...
//
// For one data loader at a time.
class TorchSampler : public torch::data::samplers::Sampler<> {
 public:
  // Throws ConfigError as DistributedSampler does.
  TorchSampler(int64_t length, const comm::World& world, SamplerOptions options = {});
  // For rank part.index of part.count.
  TorchSampler(int64_t length, Shard part, SamplerOptions options = {});

  // The data loader's next begin() begins this epoch >= 0.
  void set_epoch(int64_t epoch);
  // The one that the data loader is in, or will begin with.
  int64_t epoch() const;

  // The state of a loop that has taken this many batches of the epoch (of a resumed one, since it
  // resumed); after the last, the beginning of the next epoch. The loop has to count them, since a
  // data loader with workers has asked for more than it has handed out:
  //
  //   for (int64_t epoch = sampler.epoch(); epoch < 10; ++epoch) {
  //     taken = 0;  // directly before the pass, not after it: a save there would repeat the epoch
  //     for (auto& batch : *loader) {
  //       ...  // the step
  //       ++taken;
  //       if (++step % 100 == 0) checkpoints.save(step);
  //     }
  //   }
  //
  // The data loader has to hand batches out in their order: with
  // DataLoaderOptions::enforce_ordering(false) and workers it is not known which ones the loop has
  // had, and a run that resumes repeats some samples and leaves others out. With its
  // drop_last(true) the rest that makes no full batch still belongs to the epoch: a run that
  // resumes after the last batch goes on with that rest, which is no batch, and then with the next
  // epoch.
  //
  // Throws ConfigError for more batches than the data loader has asked for. Warns, once, of 0 at
  // the end of an epoch.
  SamplerState state_after(int64_t batches) const;
  // The next begin() resumes from there, on any number of ranks and with any batch size; from the
  // end of an epoch, with the next one. Throws ConfigError, and changes nothing, for a state of
  // another seed or shuffle, or, but at the beginning of an epoch, another number of samples.
  void restore(const SamplerState& state);
  // Throws what restore() would throw for this state.
  void check(const SamplerState& state) const;

  // What the data loader calls. With another size the data set has changed: the next epoch is of
  // that many samples.
  void reset(std::optional<size_t> new_size = std::nullopt) override;
  std::optional<std::vector<size_t>> next(size_t batch_size) override;

  // Where the data loader stands; with workers that is ahead of the loop, whose place is
  // state_after(). load() throws as restore() does.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace lockstep::data

namespace lockstep {
using data::TorchSampler;
}  // namespace lockstep
