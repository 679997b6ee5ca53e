#include "data/batch_maker.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

// The text of the exception being handled.
std::string current_reason() {
  try {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

// What `call` throws, as text; nothing when it returns.
template <typename Call>
std::optional<std::string> failure_of(const Call& call) {
  try {
    call();
    return std::nullopt;
  } catch (...) {
    return current_reason();
  }
}

std::string samples_text(const std::vector<int64_t>& indices) {
  constexpr size_t kShown = 8;
  const size_t shown = std::min(indices.size(), kShown);
  return fmt::format(
      "samples {}{}", fmt::join(indices.begin(), indices.begin() + shown, ", "),
      shown < indices.size() ? fmt::format(", ... ({} in all)", indices.size()) : "");
}

}  // namespace

BatchMaker::BatchMaker(const Dataset& dataset, const Transforms& transforms,
                       DistributedSampler sampler, Shard part, int64_t batch_size, int64_t count)
    : dataset_(dataset),
      transforms_(transforms),
      sampler_(std::move(sampler)),
      part_(part),
      batch_size_(batch_size),
      count_(count) {
  indices_.reserve(static_cast<size_t>(std::min(batch_size, sampler_.size())));
}

Batch BatchMaker::make(int64_t number, Batch spare) {
  const int64_t begin = number * batch_size_;
  const int64_t end = begin + std::min(batch_size_, sampler_.size() - begin);
  indices_.resize(static_cast<size_t>(end - begin));
  for (int64_t i = begin; i < end; ++i) indices_[static_cast<size_t>(i - begin)] = sampler_[i];

  Batch batch;
  try {
    batch = dataset_.refill(std::move(spare), indices_);
  } catch (...) {
    fail_reading(number, current_reason());
  }
  if (transforms_.empty()) return batch;
  const at::NoGradGuard no_grad;
  for (size_t t = 0; t < transforms_.size(); ++t) {
    try {
      batch = transforms_[t](std::move(batch));
    } catch (...) {
      throw DataError(fmt::format("{}: transform {} failed on {}: {}", address(number), t,
                                  samples_text(indices_), current_reason()));
    }
  }
  return batch;
}

void BatchMaker::fail_reading(int64_t number, const std::string& reason) const {
  // The batch failed as a whole: reading its samples one by one tells whose fault it is.
  for (const int64_t index : indices_) {
    const auto one = failure_of([&] { (void)dataset_.get_batch(index); });
    if (one) {
      throw DataError(
          fmt::format("{}: sample {} cannot be read: {}", address(number), index, *one));
    }
  }
  throw DataError(fmt::format("{}: {} cannot be read together: {}", address(number),
                              samples_text(indices_), reason));
}

std::string BatchMaker::address(int64_t number) const {
  return fmt::format("[loader] rank {} of {}, epoch {}, batch {} of {}", part_.index, part_.count,
                     sampler_.state().epoch, number, count_);
}

}  // namespace lockstep::data
