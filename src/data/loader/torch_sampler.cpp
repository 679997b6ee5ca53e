#include "lockstep/data/torch_sampler.h"

#include <torch/torch.h>

#include <algorithm>
#include <utility>

namespace lockstep::data {

struct TorchSampler::State {
  Shard part;
  SamplerOptions options;
  DistributedSampler sampler;  // stands after what the data loader has asked for
  SamplerState front = {};     // of this epoch, or of what was left of it
  int64_t batch_size = 0;      // that the data loader asks for
  bool has_begun = false;

  void begin(const SamplerState& at) {
    front = at;
    has_begun = false;
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
  DistributedSampler sampler = state_->sampler;
  sampler.restore(state_->front);
  sampler.advance(batches * state_->batch_size);
  return sampler.state();
}

void TorchSampler::restore(const SamplerState& state) {
  state_->sampler.restore(state);
  state_->begin(state);
}

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
  if (count == 0) return std::nullopt;
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
