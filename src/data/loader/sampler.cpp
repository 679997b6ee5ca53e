#include "lockstep/data/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <exception>
#include <string>

#include "data/loader/divided_order.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"

namespace lockstep::data {
namespace {

std::string order_text(const SamplerState& state) {
  return fmt::format("{} samples, seed {}, {}", state.length, state.seed,
                     state.shuffle ? "shuffled" : "not shuffled");
}

at::Tensor permutation_of(int64_t length, uint64_t seed) {
  try {
    return at::randperm(length, at::detail::createCPUGenerator(seed), at::kLong);
  } catch (const std::exception&) {
    throw ConfigError(fmt::format(
        "[sampler] {} samples cannot be shuffled: there is no memory for their order, which takes "
        "{:.3g} GB; set shuffle = false",
        length, static_cast<double>(length) * sizeof(int64_t) / 1e9));
  }
}

}  // namespace

DistributedSampler::DistributedSampler(int64_t length, Shard part, SamplerOptions options)
    : length_(length), part_(part), options_(options) {
  if (part.count < 1 || part.index < 0 || part.index >= part.count || length < 0) {
    throw ConfigError(fmt::format(
        "[sampler] rank {} of {} over {} samples: need 0 <= rank < ranks and samples >= 0",
        part.index, part.count, length));
  }
  if (options.drop_last && options.exact) {
    throw ConfigError(
        "[sampler] drop_last leaves samples out and exact leaves none out: set one of them");
  }
  set_epoch(0);
}

void DistributedSampler::set_epoch(int64_t epoch) {
  if (epoch < 0) throw ConfigError(fmt::format("[sampler] epoch {}: must not be negative", epoch));
  if (epoch != epoch_ && options_.shuffle) {
    // Unsigned: Python's generator takes negative seeds modulo 2^64, too.
    const uint64_t seed = static_cast<uint64_t>(options_.seed) + static_cast<uint64_t>(epoch);
    permutation_ = permutation_of(length_, seed);
    order_ = permutation_.const_data_ptr<int64_t>();
  }
  epoch_ = epoch;
  set_position(0);
}

void DistributedSampler::set_position(int64_t position) {
  position_ = position;
  const int64_t rest = length_ - position;
  size_ = rest / part_.count;
  const int64_t left_over = rest % part_.count;
  if (left_over == 0 || options_.drop_last) return;
  if (!options_.exact || part_.index < left_over) ++size_;
}

DistributedSampler DistributedSampler::of_part(int64_t index) const {
  DistributedSampler other = *this;
  other.part_.index = index;
  other.set_position(position_);
  return other;
}

std::vector<int64_t> DistributedSampler::indices() const {
  note_order(state(), part_);
  std::vector<int64_t> all(static_cast<size_t>(size_));
  for (int64_t i = 0; i < size_; ++i) all[static_cast<size_t>(i)] = (*this)[i];
  return all;
}

void DistributedSampler::advance(int64_t count) {
  if (count < 0) throw ConfigError(fmt::format("[sampler] advance by {}", count));
  const int64_t rest = length_ - position_;
  // Without the product that could overflow.
  set_position(count > rest / part_.count ? length_ : position_ + count * part_.count);
}

void DistributedSampler::check(const SamplerState& state) const {
  // At the beginning of an epoch the data may have grown, or become fewer.
  if ((state.length != length_ && state.position != 0) || state.seed != options_.seed ||
      state.shuffle != options_.shuffle) {
    throw ConfigError(fmt::format(
        "[sampler] cannot resume: the state is of {}, this is {}; resume with the same data and "
        "options, or start an epoch from its beginning",
        order_text(state), order_text(this->state())));
  }
  if (state.epoch < 0 || state.position < 0 || state.position > length_) {
    throw ConfigError(fmt::format(
        "[sampler] cannot resume at epoch {}, position {} of {} samples: the state is damaged",
        state.epoch, state.position, length_));
  }
}

void DistributedSampler::restore(const SamplerState& state) {
  check(state);
  set_epoch(state.epoch);
  set_position(state.position);
  if (state.length != length_ && part_.index == 0) {
    log::warn(fmt::format(
        "[sampler] resumes at the beginning of epoch {} with {} samples, where the state is of {}",
        state.epoch, length_, state.length));
  }
}

}  // namespace lockstep::data
