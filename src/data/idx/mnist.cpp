#include "lockstep/data/mnist.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <string>
#include <system_error>
#include <utility>

#include "data/image/pixels.h"
#include "data/rows.h"
#include "lockstep/core/error.h"
#include "lockstep/data/idx.h"

namespace lockstep::data {
namespace {

constexpr int64_t kSide = 28;
static_assert(kPixels == kSide * kSide);
constexpr int kClasses = 10;
constexpr const char* kMnist = "[mnist]";

bool is_there(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

// The file as it is, or else its gzip form.
std::filesystem::path find(const std::filesystem::path& folder, const std::string& stem,
                           std::string_view name, std::string_view advice) {
  for (const char* ending : {"", ".gz"}) {
    if (is_there(folder / (stem + ending))) return folder / (stem + ending);
  }
  throw DataError(fmt::format("{} {} is missing: expected {} or {}.gz in '{}', found {}; {}",
                              kMnist, name, stem, stem, folder.string(),
                              is_there(folder) ? "neither" : "no such folder", advice));
}

void check_sizes(const std::filesystem::path& file, const IdxArray& array,
                 const std::vector<int64_t>& sample_sizes) {
  if (array.sizes.size() != sample_sizes.size() + 1 ||
      !std::equal(sample_sizes.begin(), sample_sizes.end(), array.sizes.begin() + 1)) {
    std::string expected = "N";
    for (const int64_t size : sample_sizes) expected += fmt::format(" x {}", size);
    throw DataError(fmt::format("{} {}: wrong sizes: expected {}, found {}", kMnist, file.string(),
                                expected, fmt::join(array.sizes, " x ")));
  }
  if (array.sizes[0] == 0) {
    throw DataError(
        fmt::format("{} {}: expected at least one sample, found 0", kMnist, file.string()));
  }
}

void check_labels(const std::filesystem::path& file, const std::vector<uint8_t>& labels) {
  const auto bad =
      std::find_if(labels.begin(), labels.end(), [](uint8_t label) { return label >= kClasses; });
  if (bad != labels.end()) {
    throw DataError(fmt::format("{} {}: sample {}: expected a label from 0 to {}, found {}", kMnist,
                                file.string(), bad - labels.begin(), kClasses - 1, *bad));
  }
}

// The images of a batch lie anywhere in 47 MB: asking for them ahead of their turn halves the time
// of a batch.
constexpr size_t kAhead = 4;

void fetch_ahead(const uint8_t* image) {
  constexpr int64_t kCacheLine = 64;
  for (int64_t p = 0; p < kPixels; p += kCacheLine) __builtin_prefetch(image + p);
}

}  // namespace

Mnist::Mnist(const std::filesystem::path& folder, Split split, const ImageOptions& options)
    : Mnist(folder, split, options,
            {"MNIST", 0.1307F, 0.3081F, "put the four files of MNIST into this folder"}) {}

Mnist::Mnist(const std::filesystem::path& folder, Split split, const ImageOptions& options,
             const Traits& traits)
    : flatten_(options.flatten),
      mean_(options.mean.value_or(traits.mean)),
      deviation_(options.deviation.value_or(traits.deviation)) {
  if (!(deviation_ > 0)) {
    throw ConfigError(fmt::format("{} deviation must be positive, not {}", kMnist, deviation_));
  }

  const std::string part = split == Split::Train ? "train" : "t10k";
  const auto image_file = find(folder, part + "-images-idx3-ubyte", traits.name, traits.advice);
  const auto label_file = find(folder, part + "-labels-idx1-ubyte", traits.name, traits.advice);
  IdxArray labels = read_idx(label_file);
  check_sizes(label_file, labels, {});
  check_labels(label_file, labels.bytes);
  IdxArray images = read_idx(image_file);
  check_sizes(image_file, images, {kSide, kSide});
  if (images.sizes[0] != labels.sizes[0]) {
    throw DataError(fmt::format(
        "{} counts differ: {} images in {}, {} labels in {}; take both from one source", kMnist,
        images.sizes[0], image_file.string(), labels.sizes[0], label_file.string()));
  }
  images_ = std::move(images.bytes);
  labels_ = std::move(labels.bytes);
}

Batch Mnist::refill(Batch spare, at::IntArrayRef indices) const {
  check_indices(kMnist, indices, size());
  const auto count = static_cast<int64_t>(indices.size());
  const std::array<int64_t, 2> flat{count, kPixels};
  const std::array<int64_t, 4> image{count, 1, kSide, kSide};
  Batch batch{reuse_or_empty(std::move(spare.data),
                             flatten_ ? at::IntArrayRef(flat) : at::IntArrayRef(image), at::kFloat),
              reuse_or_empty(std::move(spare.target), {count}, at::kLong)};
  auto* pixels = batch.data.data_ptr<float>();
  auto* targets = batch.target.data_ptr<int64_t>();
  for (size_t i = 0; i < indices.size(); ++i) {
    if (i + kAhead < indices.size()) fetch_ahead(images_.data() + indices[i + kAhead] * kPixels);
    normalise_image(pixels + i * kPixels, images_.data() + indices[i] * kPixels,
                    {mean_, deviation_});
    targets[i] = labels_[static_cast<size_t>(indices[i])];
  }
  return batch;
}

FashionMnist::FashionMnist(const std::filesystem::path& folder, Split split,
                           const ImageOptions& options)
    : Mnist(folder, split, options,
            {"Fashion-MNIST", 0.2860F, 0.3530F,
             "install Debian's package dataset-fashion-mnist (/usr/share/datasets/fashion-mnist) "
             "or put its four files into this folder"}) {}

}  // namespace lockstep::data
