#include "data/loader/batch_maker.h"

#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "comm/text.h"
#include "data/loader/draws.h"
#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

// A thread of the loader has none, and the loop may have one.
class NoAutocast {
 public:
  NoAutocast() {
    for (const auto device : {at::kCPU, at::kCUDA}) set(device, false);
  }
  ~NoAutocast() {
    set(at::kCPU, on_cpu_);
    set(at::kCUDA, on_cuda_);
  }
  NoAutocast(const NoAutocast&) = delete;
  NoAutocast& operator=(const NoAutocast&) = delete;

 private:
  static void set(at::DeviceType device, bool on) {
    at::autocast::set_autocast_enabled(device, on);
  }
  bool on_cpu_ = at::autocast::is_autocast_enabled(at::kCPU);
  bool on_cuda_ = at::autocast::is_autocast_enabled(at::kCUDA);
};

// What `call` throws, as text; nothing when it returns.
template <typename Call>
std::optional<std::string> failure_of(const Call& call) {
  try {
    call();
    return std::nullopt;
  } catch (...) {
    return comm::thrown_text();
  }
}

std::string samples_text(const std::vector<int64_t>& indices) {
  constexpr size_t kShown = 8;
  const size_t shown = std::min(indices.size(), kShown);
  return fmt::format(
      "samples {}{}", fmt::join(indices.begin(), indices.begin() + shown, ", "),
      shown < indices.size() ? fmt::format(", ... ({} in all)", indices.size()) : "");
}

// Throws unless the batch has `count` samples: ranks whose batches differ would be averaged as if
// they did not.
void check_batch(const Batch& batch, size_t count) {
  const auto fits = [count](const at::Tensor& tensor) {
    return tensor.dim() > 0 && tensor.size(0) == static_cast<int64_t>(count);
  };
  if (!batch.data.defined()) throw DataError("the batch's data is an undefined tensor");
  if (fits(batch.data) && (!batch.target.defined() || fits(batch.target))) return;
  throw DataError(
      fmt::format("data [{}] and target [{}] are not a batch of {}, which is dimension 0 of both; "
                  "several of one sample go into a dimension of "
                  "their own",
                  fmt::join(batch.data.sizes(), ", "),
                  batch.target.defined() ? fmt::format("{}", fmt::join(batch.target.sizes(), ", "))
                                         : "undefined",
                  count == 1 ? "1 sample" : fmt::format("{} samples", count)));
}

}  // namespace

BatchMaker::BatchMaker(const Dataset& dataset, const std::vector<Transform>& transforms,
                       DistributedSampler sampler, std::string whose, int64_t batch_size,
                       int64_t count)
    : dataset_(dataset),
      transforms_(transforms),
      sampler_(std::move(sampler)),
      whose_(std::move(whose)),
      batch_size_(batch_size),
      count_(count) {}

Batch BatchMaker::make(int64_t number, Batch spare) const {
  const int64_t begin = number * batch_size_;
  const int64_t end = begin + std::min(batch_size_, sampler_.size() - begin);
  std::vector<int64_t> indices(static_cast<size_t>(end - begin));
  for (int64_t i = begin; i < end; ++i) indices[static_cast<size_t>(i - begin)] = sampler_[i];

  const c10::InferenceMode normal(false);  // a thread of the loader has none, either
  const at::NoGradGuard no_grad;
  const NoAutocast no_autocast;
  Batch batch = read(number, std::move(spare), indices);
  for (size_t t = 0; t < transforms_.size(); ++t) {
    try {
      Draws draws({sampler_.seed(), sampler_.state().epoch, static_cast<int64_t>(t) + 1});
      batch = transforms_[t].apply(std::move(batch), indices, draws);
      check_batch(batch, indices.size());
    } catch (...) {
      throw DataError(fmt::format("{}: transform {} failed on {}: {}", address(number), t,
                                  samples_text(indices), comm::thrown_text()));
    }
  }
  return batch;
}

Batch BatchMaker::read(int64_t number, Batch spare, const std::vector<int64_t>& indices) const {
  Draws draws({sampler_.seed(), sampler_.state().epoch, 0});
  draws.for_batch(indices[0]);
  try {
    Batch batch = dataset_.refill(std::move(spare), indices);
    check_batch(batch, indices.size());
    return batch;
  } catch (...) {
    fail_reading(number, indices, comm::thrown_text());
  }
}

void BatchMaker::fail_reading(int64_t number, const std::vector<int64_t>& indices,
                              const std::string& reason) const {
  // The batch failed as a whole: reading its samples one by one tells whose fault it is.
  for (const int64_t index : indices) {
    const auto one = failure_of([&] { check_batch(dataset_.get_batch(index), 1); });
    if (one) {
      throw DataError(
          fmt::format("{}: sample {} cannot be read: {}", address(number), index, *one));
    }
  }
  throw DataError(fmt::format("{}: {} cannot be read together: {}", address(number),
                              samples_text(indices), reason));
}

std::string BatchMaker::address(int64_t number) const {
  return fmt::format("[loader] {}, epoch {}, batch {} of {}", whose_, sampler_.state().epoch,
                     number, count_);
}

}  // namespace lockstep::data
