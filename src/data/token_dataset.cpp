#include "lockstep/data/token_dataset.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>

#include "data/rows.h"
#include "lockstep/core/error.h"

namespace lockstep::data {

TokenDataset::TokenDataset(const std::string& path, const TokenDatasetOptions& options)
    : options_(options) {
  if (options.sequence_length < 1 || options.first < 0 || options.count < 0) {
    throw ConfigError(
        fmt::format("[tokens] {}: sequence_length = {}, first = {}, count = {}: the length is 1 or "
                    "above, the others 0 or above",
                    path, options.sequence_length, options.first, options.count));
  }
  files_ = text::TokenFiles::open(path, options.type);
  if (options.mask_boundaries && !files_.separator()) {
    throw ConfigError(fmt::format(
        "[tokens] {}: mask_boundaries needs a separator, which a single file does not name", path));
  }
  begins_.push_back(0);
  for (size_t i = 0; i < files_.shards(); ++i) {
    begins_.push_back(begins_.back() +
                      std::max<int64_t>(0, files_.tokens(i) - 1) / options.sequence_length);
  }
  const int64_t all = begins_.back();
  count_ = options.count > 0 ? options.count : all - options.first;
  if (count_ < 1 || count_ > all - options.first) {
    throw DataError(fmt::format("[tokens] {}: {} sequences of {} tokens; {} from {} on are wanted",
                                path, all, options.sequence_length,
                                options.count > 0 ? fmt::to_string(options.count) : "some",
                                options.first));
  }
}

Batch TokenDataset::refill(Batch spare, at::IntArrayRef indices) const {
  const int64_t length = options_.sequence_length, n = static_cast<int64_t>(indices.size());
  Batch batch{reuse_or_empty(std::move(spare.data), {n, length}, at::kLong),
              reuse_or_empty(std::move(spare.target), {n, length}, at::kLong)};
  std::vector<int64_t> tokens(static_cast<size_t>(length) + 1);
  for (int64_t row = 0; row < n; ++row) {
    const int64_t index = indices[static_cast<size_t>(row)];
    if (index < 0 || index >= count_) {
      throw DataError(fmt::format("[tokens] sample {} is wanted; there are {}", index, count_));
    }
    const int64_t sample = options_.first + index;
    const auto next = std::upper_bound(begins_.begin(), begins_.end(), sample);
    const auto shard = static_cast<size_t>(next - begins_.begin()) - 1;
    files_.read(shard, (sample - begins_[shard]) * length, tokens);
    int64_t* data = batch.data.mutable_data_ptr<int64_t>() + row * length;
    int64_t* target = batch.target.mutable_data_ptr<int64_t>() + row * length;
    std::copy(tokens.begin(), tokens.end() - 1, data);
    std::copy(tokens.begin() + 1, tokens.end(), target);
    if (!options_.mask_boundaries) continue;
    for (int64_t i = 0; i < length; ++i) {
      if (data[i] == *files_.separator()) target[i] = -100;
    }
  }
  return batch;
}

}  // namespace lockstep::data
