#include "lockstep/data/torch_sampler.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "core/divided_up.h"
#include "data/loader/divided_order.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"

namespace lockstep::data {
namespace {

// Where the sampler stands, or, when no rank has a sample left there, the beginning of the next
// epoch: a loop that resumed at the end of one would go through an empty epoch.
SamplerState place_of(const DistributedSampler& sampler) {
  SamplerState state = sampler.state();
  if (state.position == 0 || sampler.of_part(0).size() > 0) return state;
  ++state.epoch;
  state.position = 0;
  return state;
}

}  // namespace

struct TorchSampler::State {
  Shard part;
  SamplerOptions options;
  DistributedSampler sampler;  // stands after what the data loader has asked for
  SamplerState front = {};     // of this epoch, or of what was left of it
  int64_t batch_size = 0;      // that the data loader asks for
  int64_t asked = 0;           // batches since `front` that it has been given
  bool is_over = false;        // it has been given the last, or a short one, which it may drop
  bool is_told = false;        // it has been told that there are no more
  bool has_begun = false;
  bool has_warned = false;

  void begin(const SamplerState& at) {
    front = at;
    asked = 0;
    is_over = is_told = has_begun = false;
  }
};

TorchSampler::TorchSampler(int64_t length, const comm::World& world, SamplerOptions options)
    : TorchSampler(length, Shard{world.rank(), world.size()}, options) {}

TorchSampler::TorchSampler(int64_t length, Shard part, SamplerOptions options)
    : state_(std::make_shared<State>(
          State{part, options, DistributedSampler(length, part, options)})) {
  state_->begin(state_->sampler.state());
}

void TorchSampler::set_epoch(int64_t epoch) {
  state_->sampler.set_epoch(epoch);
  state_->begin(state_->sampler.state());
}

int64_t TorchSampler::epoch() const { return state_->front.epoch; }

SamplerState TorchSampler::state_after(int64_t batches) const {
  State& state = *state_;
  DistributedSampler sampler = state.sampler;
  sampler.restore(state.front);
  int64_t asked = state.asked;
  if (state.is_over) {  // with `exact` other ranks may have had one more
    asked = divided_up(sampler.of_part(0).size(), state.batch_size);
  }
  if (batches < 0 || batches > asked) {
    throw ConfigError(fmt::format(
        "[sampler] {} batches taken of epoch {}, of which the data loader has asked for {}: count "
        "the batches of this pass alone, and set the count to 0 directly before each pass",
        batches, state.front.epoch, asked));
  }
  // A loop without workers is in the only batch when that has been asked for.
  const bool may_be_first = asked <= 1 && !state.is_told;
  if (batches == 0 && state.is_over && asked > 0 && !may_be_first && state.part.index == 0 &&
      !std::exchange(state.has_warned, true)) {
    log::warn(fmt::format(
        "[sampler] epoch {} is over and 0 batches of it count as taken, so a run that resumes here "
        "goes through it again: set the count to 0 directly before each pass over the data loader, "
        "not after it",
        state.front.epoch));
  }
  sampler.advance(batches * state.batch_size);
  return place_of(sampler);
}

void TorchSampler::restore(const SamplerState& state) {
  DistributedSampler& sampler = state_->sampler;
  sampler.restore(state);
  if (const SamplerState place = place_of(sampler); place != state) sampler.restore(place);
  state_->begin(sampler.state());
}

void TorchSampler::check(const SamplerState& state) const { state_->sampler.check(state); }

void TorchSampler::reset(std::optional<size_t> new_size) {
  State& state = *state_;
  const auto length = static_cast<int64_t>(new_size.value_or(state.front.length));
  const int64_t epoch = state.front.epoch + (state.has_begun ? 1 : 0);
  if (length != state.front.length) {
    state.sampler = DistributedSampler(length, state.part, state.options);
  }
  if (state.has_begun || length != state.front.length) set_epoch(epoch);
  state.has_begun = true;
}

std::optional<std::vector<size_t>> TorchSampler::next(size_t batch_size) {
  DistributedSampler& sampler = state_->sampler;
  state_->batch_size = static_cast<int64_t>(batch_size);
  const int64_t count = std::min(state_->batch_size, sampler.size());
  state_->is_told = count == 0;
  state_->is_over = count < state_->batch_size;
  if (state_->is_told) return std::nullopt;
  ++state_->asked;
  note_order(sampler.state(), state_->part);
  std::vector<size_t> indices(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    indices[static_cast<size_t>(i)] = static_cast<size_t>(sampler[i]);
  }
  sampler.advance(count);
  return indices;
}

void TorchSampler::save(torch::serialize::OutputArchive& archive) const {
  const SamplerState state = state_->sampler.state();
  archive.write("epoch", c10::IValue(state.epoch));
  archive.write("position", c10::IValue(state.position));
  archive.write("seed", c10::IValue(state.seed));
  archive.write("length", c10::IValue(state.length));
  archive.write("shuffle", c10::IValue(state.shuffle));
}

void TorchSampler::load(torch::serialize::InputArchive& archive) {
  const auto read = [&](const char* key) {
    c10::IValue value;
    archive.read(key, value);
    return value;
  };
  restore({.epoch = read("epoch").toInt(),
           .position = read("position").toInt(),
           .seed = read("seed").toInt(),
           .length = read("length").toInt(),
           .shuffle = read("shuffle").toBool()});
}

}  // namespace lockstep::data
