// Images in folders, one per class.
//
//   ImageFolder train("flowers/train", {.size = 224});
//   ImageFolder test("flowers/test", {.size = 224, .classes = train.classes()});
//   Loader loader(train, world, {.batch_size = 32, .workers = 4});
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "lockstep/data/dataset.h"

namespace lockstep::data {

// How an image of any size becomes a square.
enum class ImageFit {
  Crop,     // the shorter side is resized to `size`, and the middle is cut out
  Stretch,  // both sides are resized to `size`
};

// What happens to a file that is not an image, or is damaged.
enum class BadImages {
  Error,  // DataError with the file, when it is to be read
  // Left out and counted: the constructor decodes all files once.
  Skip,
};

// How images are read.
struct ImageFolderOptions {
  int64_t size = 224;    // height and width
  int64_t channels = 3;  // 3: RGB; 1: grey, as PIL converts ("L"), which of 16 bits
                         // clips at 255 where this keeps the upper 8
  ImageFit fit = ImageFit::Crop;
  // A pixel v of 0..255 becomes (v / 255 - mean) / deviation by channel; when not given, those of
  // ImageNet, or of grey images 0.5 and 0.5.
  std::vector<float> mean = {};
  std::vector<float> deviation = {};
  // The classes 0, 1, ..., as classes() of the training data gives them; sub-folders of other names
  // are then errors. Empty: the sub-folders.
  std::vector<std::string> classes = {};
  BadImages bad_images = BadImages::Error;
};

// PNG and JPEG files (.png, .jpg, .jpeg, in any case) anywhere below the sub-folders of a folder;
// the class is the number of the sub-folder in the order of names, samples are in the order of
// their paths, as in torchvision's ImageFolder. Batches: data float32 n x channels x size x size,
// target int64 n. Files are read and decoded when their batch is made: give LoaderOptions::workers.
// Resizing is bilinear with antialiasing; transparency and orientation notes are left out, as
// torchvision does.
class ImageFolder : public Dataset {
 public:
  // Lists the files; a relative folder is one of the working directory of now. Throws DataError
  // when the folder, a sub-folder or an image is missing, and ConfigError for impossible options.
  explicit ImageFolder(const std::filesystem::path& folder, const ImageFolderOptions& options = {});

  int64_t size() const override { return static_cast<int64_t>(files_.size()); }
  // Throws DataError that names the file when one cannot be read or decoded.
  Batch get_batch(at::IntArrayRef indices) const override;

  // Names of sub-folders, by class.
  const std::vector<std::string>& classes() const { return options_.classes; }
  // The file of a sample: its whole path.
  const std::filesystem::path& file(int64_t sample) const;
  // The class of each sample, without reading it.
  const std::vector<int64_t>& labels() const { return labels_; }
  // Damaged images that were left out, and what was wrong with the first.
  int64_t skipped() const { return skipped_; }
  const std::string& first_skipped() const { return first_skipped_; }

 private:
  void list(const std::filesystem::path& folder);
  void leave_out_bad_images();

  ImageFolderOptions options_;
  std::vector<std::filesystem::path> files_;
  std::vector<int64_t> labels_;
  int64_t skipped_ = 0;
  std::string first_skipped_;
};

// The image of a PNG or JPEG file: uint8, height x width x channels (3: RGB, 1: grey). Throws
// DataError that names the file for anything else, for damaged ones, and for more than 2^28 pixels.
at::Tensor read_image(const std::filesystem::path& file, int64_t channels = 3);

}  // namespace lockstep::data

namespace lockstep {
using data::ImageFolder;
}  // namespace lockstep
