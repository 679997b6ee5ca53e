#include "lockstep/data/image_folder.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <system_error>
#include <utility>

#include "core/files/lasting_path.h"
#include "core/words.h"
#include "data/image/decode_image.h"
#include "data/mapped_bytes.h"
#include "data/rows.h"
#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

namespace fs = std::filesystem;

bool is_image(const fs::path& file) {
  const std::string ending = lower_case(file.extension().string());
  return ending == ".png" || ending == ".jpg" || ending == ".jpeg";
}

// A link to a folder that it lies in would be followed again and again, until there are too many
// links. It was found below `folder`, whose own path may have gone through others by "..".
void refuse_loop(const fs::path& link, const fs::path& folder) {
  const fs::path way = link.parent_path().lexically_relative(folder);
  for (fs::path place = fs::canonical(folder) / way;; place = place.parent_path()) {
    std::error_code status;
    if (fs::equivalent(place, link, status)) {
      throw DataError(
          fmt::format("[image folder] {} is a link to {}, a folder that it lies in: its images "
                      "would come again and again; remove the link",
                      link.string(), place.string()));
    }
    if (!place.has_relative_path()) return;
  }
}

// Everything below `folder` that `wanted` accepts, in the order of paths.
template <class Wanted>
std::vector<fs::path> below(const fs::path& folder, const Wanted& wanted) {
  std::vector<fs::path> found;
  std::error_code status;
  fs::recursive_directory_iterator entry(folder, fs::directory_options::follow_directory_symlink,
                                         status),
      end;
  for (; !status && entry != end; entry.increment(status)) {
    std::error_code none;
    const auto type = entry->status(none).type();
    if (type == fs::file_type::directory) {
      if (entry->is_symlink(none)) refuse_loop(entry->path(), folder);
      continue;
    }
    entry.disable_recursion_pending();
    // Of a link that leads nowhere, or to itself, reading says what is wrong.
    const bool is_file = type == fs::file_type::regular || type == fs::file_type::not_found ||
                         type == fs::file_type::none;
    if (is_file && wanted(entry->path())) found.push_back(entry->path());
  }
  if (status) {
    throw DataError(fmt::format("[image folder] {}: {}", folder.string(), status.message()));
  }
  // As torchvision's: folders by their whole paths, and then names.
  std::sort(found.begin(), found.end(), [](const fs::path& one, const fs::path& other) {
    return std::pair(one.parent_path().native(), one.filename().native()) <
           std::pair(other.parent_path().native(), other.filename().native());
  });
  return found;
}

// The parts of red, green and blue that PIL gives them, in 1 / 65536.
at::Tensor grey_of(const Pixels& pixels) {
  at::Tensor grey = at::empty({pixels.height, pixels.width, 1}, at::kByte);
  auto* to = grey.data_ptr<uint8_t>();
  const uint8_t* from = pixels.rgb.data();
  for (int64_t i = 0; i < pixels.height * pixels.width; ++i, from += 3) {
    to[i] =
        static_cast<uint8_t>((from[0] * 19595 + from[1] * 38470 + from[2] * 7471 + 0x8000) >> 16);
  }
  return grey;
}

// Of a part of an image, in float32 at most 200 MB.
constexpr int64_t kMostPixels = int64_t{1} << 24;

// libtorch resizes each row, and then each column, by itself. Of one column alone 2.15 resizes to
// other values.
at::Tensor resized(const at::Tensor& of, int64_t rows, int64_t columns) {
  const auto to = [](const at::Tensor& plane, int64_t height, int64_t width) {
    if (plane.size(2) == height && plane.size(3) == width) return plane;
    return at::_upsample_bilinear2d_aa(plane, {height, width}, /*align_corners=*/false);
  };
  if (columns > 1) return to(of, rows, columns);
  return to(to(of, of.size(2), 1).repeat({1, 1, 1, 2}), rows, 2).narrow(3, 0, 1);
}

// float32 channels x size x size, from 0 to 255.
at::Tensor fitted(const at::Tensor& image, int64_t size, ImageFit fit) {
  at::Tensor plane = image.permute({2, 0, 1}).to(at::kFloat).unsqueeze(0);
  const int64_t height = image.size(0), width = image.size(1);
  int64_t to_height = size, to_width = size;
  if (fit == ImageFit::Crop) {  // rounded down, as torchvision does
    if (height < width) {
      to_width = size * width / height;
    } else {
      to_height = size * height / width;
    }
  }
  // torchvision's CenterCrop rounds half to even.
  const auto middle = [&](const at::Tensor& of, int64_t dim) {
    const auto rest = static_cast<double>(of.size(dim) - size);
    return of.narrow(dim, static_cast<int64_t>(std::nearbyint(rest / 2)), size);
  };
  if (std::max(to_height, to_width) <= 16 * size) {
    return middle(middle(resized(plane, to_height, to_width), 2), 3)[0];
  }
  // Of an image of 1 x 30,000 pixels the whole would take 18 GB. Cutting between rows and columns,
  // and in parts, changes no bit.
  plane = middle(resized(plane, height, to_width), 3);
  const auto at_once = std::clamp<int64_t>(kMostPixels / to_height, 1, size);
  std::vector<at::Tensor> columns;
  for (int64_t next = 0; next < size; next += at_once) {
    const auto begin = std::min(next, size - at_once);
    const at::Tensor some = resized(plane.narrow(3, begin, at_once), to_height, at_once);
    columns.push_back(middle(some, 2).slice(3, next - begin));
  }
  return at::cat(columns, 3)[0];
}

}  // namespace

at::Tensor read_image(const fs::path& file, int64_t channels) {
  if (channels != 1 && channels != 3) {
    throw ConfigError(fmt::format("[image] channels = {}: 1 (grey) or 3 (RGB)", channels));
  }
  const MappedBytes bytes(file, "[image]");
  const Pixels pixels = decode_image(bytes.view(), file.string());
  if (channels == 1) return grey_of(pixels);
  return at::from_blob(const_cast<uint8_t*>(pixels.rgb.data()), {pixels.height, pixels.width, 3},
                       at::kByte)
      .clone();
}

ImageFolder::ImageFolder(const fs::path& folder, const ImageFolderOptions& options)
    : options_(options) {
  if (options_.size < 1 || (options_.channels != 1 && options_.channels != 3)) {
    throw ConfigError(
        fmt::format("[image folder] size = {}, channels = {}: needs a size of at "
                    "least 1, and 1 (grey) or 3 (RGB) channels",
                    options_.size, options_.channels));
  }
  const bool colours = options_.channels == 3;
  if (options_.mean.empty()) {
    options_.mean = colours ? std::vector<float>{0.485F, 0.456F, 0.406F} : std::vector<float>{0.5F};
  }
  if (options_.deviation.empty()) {
    options_.deviation =
        colours ? std::vector<float>{0.229F, 0.224F, 0.225F} : std::vector<float>{0.5F};
  }
  const auto positive = [](float value) { return value > 0; };
  if (std::ssize(options_.mean) != options_.channels ||
      std::ssize(options_.deviation) != options_.channels ||
      !std::all_of(options_.deviation.begin(), options_.deviation.end(), positive)) {
    throw ConfigError(fmt::format(
        "[image folder] mean [{}] and deviation [{}]: needs {} of each, "
        "and positive deviations",
        fmt::join(options_.mean, ", "), fmt::join(options_.deviation, ", "), options_.channels));
  }
  list(lasting_path(folder));
  if (options_.bad_images == BadImages::Skip) leave_out_bad_images();
}

void ImageFolder::list(const fs::path& folder) {
  std::error_code status;
  std::vector<std::string> names;
  for (fs::directory_iterator entry(folder, status), end; !status && entry != end;
       entry.increment(status)) {
    std::error_code unknown;
    const auto type = entry->status(unknown).type();
    if (type == fs::file_type::directory) names.push_back(entry->path().filename().string());
    // A class of the data may be behind it.
    if (type == fs::file_type::none) {
      throw DataError(
          fmt::format("[image folder] {}: {}", entry->path().string(), unknown.message()));
    }
  }
  if (status) {
    throw DataError(fmt::format("[image folder] {}: {}", folder.string(), status.message()));
  }
  std::sort(names.begin(), names.end());
  if (names.empty()) {
    throw DataError(
        fmt::format("[image folder] {} has no sub-folders: there has to be one for each "
                    "class, with the images in it",
                    folder.string()));
  }
  const bool given = !options_.classes.empty();
  if (!given) options_.classes = names;
  for (const auto& name : names) {
    const auto found = std::find(options_.classes.begin(), options_.classes.end(), name);
    if (found == options_.classes.end()) {
      throw DataError(fmt::format("[image folder] {}: '{}' is none of the classes {}",
                                  folder.string(), name, fmt::join(options_.classes, ", ")));
    }
    const auto images = below(folder / name, is_image);
    if (images.empty() && !given) {
      throw DataError(fmt::format("[image folder] {} has no .png, .jpg or .jpeg file",
                                  (folder / name).string()));
    }
    files_.insert(files_.end(), images.begin(), images.end());
    labels_.resize(files_.size(), found - options_.classes.begin());
  }
  if (files_.empty()) {
    throw DataError(fmt::format("[image folder] {} has no images", folder.string()));
  }
}

void ImageFolder::leave_out_bad_images() {
  size_t kept = 0;
  for (size_t i = 0; i < files_.size(); ++i) {
    try {
      const MappedBytes bytes(files_[i], "[image]");
      (void)decode_image(bytes.view(), files_[i].string());
    } catch (const DataError& error) {
      if (skipped_++ == 0) first_skipped_ = error.what();
      continue;
    }
    if (kept != i) files_[kept] = std::move(files_[i]);
    labels_[kept++] = labels_[i];
  }
  if (kept == 0) {
    throw DataError(fmt::format("[image folder] none of {} images can be read; the first: {}",
                                files_.size(), first_skipped_));
  }
  files_.resize(kept);
  labels_.resize(kept);
}

const fs::path& ImageFolder::file(int64_t sample) const {
  check_indices("[image folder]", sample, size());
  return files_[static_cast<size_t>(sample)];
}

Batch ImageFolder::get_batch(at::IntArrayRef indices) const {
  check_indices("[image folder]", indices, size());
  const auto count = static_cast<int64_t>(indices.size());
  at::Tensor data = at::empty({count, options_.channels, options_.size, options_.size}, at::kFloat);
  at::Tensor target = at::empty({count}, at::kLong);
  const auto by_channel = [&](const std::vector<float>& values) {
    return at::tensor(values).view({options_.channels, 1, 1});
  };
  const at::Tensor mean = by_channel(options_.mean), deviation = by_channel(options_.deviation);
  for (int64_t i = 0; i < count; ++i) {
    const auto sample = static_cast<size_t>(indices[static_cast<size_t>(i)]);
    const at::Tensor image = read_image(files_[sample], options_.channels);
    data[i].copy_((fitted(image, options_.size, options_.fit) / 255 - mean) / deviation);
    target[i] = labels_[sample];
  }
  return {data, target};
}

}  // namespace lockstep::data
