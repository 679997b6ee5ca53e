// MNIST and Fashion-MNIST: 28 x 28 grey images of ten classes, in four IDX files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string_view>
#include <vector>

#include "lockstep/data/dataset.h"

namespace lockstep::data {

// Which of the data set's two parts.
enum class Split { Train, Test };

// How bytes become tensors.
struct ImageOptions {
  // A pixel v of 0..255 becomes (v / 255 - mean) / deviation; when not given, mean and standard
  // deviation of the data set's training images.
  std::optional<float> mean = std::nullopt;
  std::optional<float> deviation = std::nullopt;
  // Images as rows of 784; otherwise 1 x 28 x 28.
  bool flatten = true;
};

// Batches: data float32 n x 784 (or n x 1 x 28 x 28), target int64 n with classes 0..9. Pixels are
// the same bits as torchvision's ToTensor and Normalize give. Kept as bytes, 785 per sample, and
// converted batch by batch.
class Mnist : public Dataset {
 public:
  // Reads {train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz] in `folder`. Throws DataError that
  // names the file, what was expected and what was found, ConfigError for a deviation that is not
  // positive.
  Mnist(const std::filesystem::path& folder, Split split, const ImageOptions& options = {});

  int64_t size() const override { return static_cast<int64_t>(labels_.size()); }
  Batch get_batch(at::IntArrayRef indices) const override { return refill({}, indices); }
  Batch refill(Batch spare, at::IntArrayRef indices) const override;

 protected:
  // What differs between data sets of this form.
  struct Traits {
    std::string_view name;
    float mean;
    float deviation;
    std::string_view advice;  // where to get it
  };
  // For data sets of the same form.
  Mnist(const std::filesystem::path& folder, Split split, const ImageOptions& options,
        const Traits& traits);

 private:
  bool flatten_;
  float mean_;
  float deviation_;
  std::vector<uint8_t> images_;
  std::vector<uint8_t> labels_;
};

// Debian's package dataset-fashion-mnist puts it into /usr/share/datasets/fashion-mnist.
class FashionMnist : public Mnist {
 public:
  // Reads and throws as Mnist does.
  FashionMnist(const std::filesystem::path& folder, Split split, const ImageOptions& options = {});
};

}  // namespace lockstep::data
