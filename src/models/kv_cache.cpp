#include "lockstep/models/kv_cache.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::models {

KvCache::KvCache(std::vector<Layer> layers, int64_t sequences, int64_t length,
                 std::vector<float> frequencies)
    : layers_(std::move(layers)),
      lengths_(static_cast<size_t>(sequences), 0),
      capacity_(length),
      frequencies_(std::move(frequencies)) {}

void KvCache::set_lengths(std::vector<int64_t> lengths) {
  if (lengths.size() != lengths_.size()) {
    throw ConfigError(fmt::format("[transformer] KvCache: {} lengths for {} sequences",
                                  lengths.size(), lengths_.size()));
  }
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] < 0 || lengths[i] > lengths_[i]) {
      throw ConfigError(
          fmt::format("[transformer] KvCache: sequence {} has {} tokens; it cannot get {}", i,
                      lengths_[i], lengths[i]));
    }
  }
  lengths_ = std::move(lengths);
  step_ = {};
}

void KvCache::keep(const std::vector<int64_t>& sequences) {
  if (sequences.empty()) throw ConfigError("[transformer] KvCache: no sequence would be kept");
  for (const int64_t i : sequences) {
    if (i >= 0 && i < this->sequences()) continue;
    throw ConfigError(
        fmt::format("[transformer] KvCache: there is no sequence {} of {}", i, this->sequences()));
  }
  const at::Tensor index =
      at::tensor(sequences, at::dtype(at::kLong)).to(layers_.front().keys.device());
  for (auto& [keys, values] : layers_) {
    keys = keys.index_select(0, index);
    values = values.index_select(0, index);
  }
  std::vector<int64_t> lengths;
  for (const int64_t i : sequences) lengths.push_back(lengths_[static_cast<size_t>(i)]);
  lengths_ = std::move(lengths);
  step_ = {};
}

bool KvCache::even() const {
  return std::adjacent_find(lengths_.begin(), lengths_.end(), std::not_equal_to<>()) ==
         lengths_.end();
}

bool KvCache::empty() const {
  return std::all_of(lengths_.begin(), lengths_.end(), [](int64_t length) { return length == 0; });
}

const KvCache::Step& KvCache::step(int64_t count) const {
  if (step_.count == count) return step_;
  const auto on = at::dtype(at::kLong).device(layers_.front().keys.device());
  at::Tensor own = at::arange(count, on).unsqueeze(0);
  own = even() ? own + lengths_.front()
               : own + at::tensor(lengths_, at::dtype(at::kLong)).to(on.device()).unsqueeze(1);
  at::Tensor mask;
  if (!empty() && (!even() || count > 1)) {
    const int64_t longest = *std::max_element(lengths_.begin(), lengths_.end()) + count;
    const at::Tensor all = at::arange(longest, own.options());
    mask = all.view({1, 1, 1, longest}).le(own.unsqueeze(1).unsqueeze(3));
  }
  step_ = {.count = count, .positions = std::move(own), .mask = std::move(mask)};
  return step_;
}

at::Tensor KvCache::positions(int64_t count) const { return step(count).positions; }

void KvCache::check_room(int64_t count) const {
  const int64_t longest = *std::max_element(lengths_.begin(), lengths_.end()) + count;
  if (longest > capacity_) {
    throw ConfigError(
        fmt::format("[transformer] KvCache: {} tokens, made for {}", longest, capacity_));
  }
}

KvCache::Layer KvCache::extend(int64_t layer, const at::Tensor& keys, const at::Tensor& values) {
  auto& kept = layers_.at(static_cast<size_t>(layer));
  const int64_t count = keys.size(2);
  check_room(count);
  const int64_t longest = *std::max_element(lengths_.begin(), lengths_.end()) + count;
  const auto store = [&](at::Tensor& to, const at::Tensor& from) {
    if (even()) {
      to.slice(2, lengths_.front(), longest).copy_(from);
      return;
    }
    const at::Tensor index = positions(count).unsqueeze(1).unsqueeze(3).expand(from.sizes());
    to.scatter_(2, index, from.to(to.scalar_type()));
  };
  store(kept.keys, keys);
  store(kept.values, values);
  return {kept.keys.slice(2, 0, longest), kept.values.slice(2, 0, longest)};
}

at::Tensor KvCache::mask(int64_t count) const { return step(count).mask; }

void KvCache::advance(int64_t count) {
  for (int64_t& length : lengths_) length += count;
  step_ = {};
}

}  // namespace lockstep::models
