#include "lockstep/train/file_data.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "core/files/read_file.h"
#include "core/number.h"
#include "lockstep/checkpoint/tensor_file_dataset.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/data/csv.h"
#include "lockstep/data/idx_dataset.h"
#include "lockstep/data/image_folder.h"
#include "lockstep/data/npy.h"
#include "lockstep/data/token_dataset.h"
#include "train/slice.h"

namespace lockstep::train {
namespace {

using data::Batch;
using data::Dataset;
using data::StandardScaler;
using data::TensorDataset;

// A data set whose samples are scaled.
class ScaledDataset : public Dataset {
 public:
  ScaledDataset(std::shared_ptr<const Dataset> plain, std::shared_ptr<StandardScaler> scaler)
      : plain_(std::move(plain)), scaler_(std::move(scaler)) {}

  int64_t size() const override { return plain_->size(); }
  Batch get_batch(at::IntArrayRef indices) const override {
    Batch batch = plain_->get_batch(indices);
    batch.data = scaler_->apply(batch.data);
    return batch;
  }

 private:
  std::shared_ptr<const Dataset> plain_;
  std::shared_ptr<StandardScaler> scaler_;
};

std::string given(const std::string& path, std::string_view key, const DataConfig& config) {
  if (!path.empty()) return path;
  throw ConfigError(
      fmt::format("[config] data.{} is missing: data of kind {} lie in files", key, config.kind));
}

// Whole numbers are classes: one more than the largest.
int64_t classes_of(const TensorDataset& set) {
  if (set.target().scalar_type() != at::kLong || set.target().dim() != 1) return 0;
  const auto least = set.target().min().item<int64_t>();
  return least < 0 ? 0 : set.target().max().item<int64_t>() + 1;
}

void log_skipped(const comm::World& world, const std::string& path, int64_t count,
                 const std::string& first) {
  if (count == 0 || !world.is_main()) return;
  log::warn(fmt::format("[data] {}: {} left out; the first: {}", path, count, first));
}

// Columns that are not named are the training data's: in another place they would be taken for
// others.
void check_columns(const data::CsvDataset& training, const data::CsvDataset& other,
                   const DataConfig& config, const std::string& path) {
  if (!config.csv.header) return;
  const auto check = [&](std::string_view key, const std::vector<std::string>& given,
                         const std::vector<std::string>& first,
                         const std::vector<std::string>& second) {
    if (!given.empty() || first == second) return;
    throw DataError(
        fmt::format("[csv] {} has the {} {}, and {} has {}: name them in data.{}, in one order",
                    path, key, fmt::join(second, ", "), config.path, fmt::join(first, ", "), key));
  };
  check("targets", config.csv.targets, training.target_names(), other.target_names());
  check("features", config.csv.features, training.feature_names(), other.feature_names());
}

// A file without a header would lose its first row. Numbers of columns are whole and each is there
// once.
void warn_of_names_like_data(const data::CsvDataset& set, const comm::World& world,
                             const std::string& path) {
  std::vector<std::string> names = set.feature_names();
  names.insert(names.end(), set.target_names().begin(), set.target_names().end());
  if (!std::ranges::all_of(names,
                           [](const std::string& name) { return number_from(name).has_value(); })) {
    return;
  }
  const bool is_numbered = std::ranges::all_of(names, [](const std::string& name) {
    return name.find_first_not_of("0123456789") == std::string::npos;
  });
  const std::set<std::string> distinct(names.begin(), names.end());
  if ((is_numbered && distinct.size() == names.size()) || !world.is_main()) return;
  log::warn(fmt::format(
      "[data] {}: all names of columns in its first line are numbers ({}); if that line is a row, "
      "say data.header: false",
      path,
      fmt::join(names.begin(), names.begin() + std::min<ptrdiff_t>(5, std::ssize(names)), ", ")));
}

FileData csv(const DataConfig& config, const comm::World& world) {
  const CsvConfig& keys = config.csv;
  if (keys.delimiter.size() != 1) {
    throw ConfigError(
        fmt::format("[config] data.delimiter = '{}': needs to be one character", keys.delimiter));
  }
  data::CsvOptions options{
      .targets = keys.targets,
      .features = keys.features,
      .delimiter = keys.delimiter[0],
      .header = keys.header,
      .classification = keys.classification,
      .missing_values =
          keys.missing_values == "nan" ? data::MissingValues::Nan : data::MissingValues::Bad,
      .bad_rows = keys.bad_rows == "skip" ? data::BadRows::Skip : data::BadRows::Error};
  const auto open = [world](const std::string& path, const data::CsvOptions& how) {
    auto set = std::make_shared<data::CsvDataset>(path, how);
    log_skipped(world, path, set->skipped(), set->first_skipped());
    return set;
  };
  const auto training = open(given(config.path, "path", config), options);
  if (keys.header) warn_of_names_like_data(*training, world, config.path);
  options.classes = training->class_names();
  FileData all{.training = training, .classes = training->class_count()};
  if (keys.scaling == "standard") {
    all.scaler = std::make_shared<StandardScaler>();
    // Not on what is held out for evaluation.
    const Slice part(training, {0, training->size() - held_out(config, training->size())});
    all.scaler->fit(part, world, {.names = training->feature_names()});
    all.training = std::make_shared<ScaledDataset>(training, all.scaler);
  }
  all.more = [=, scaler = all.scaler](const DataConfig& files) {
    const auto other = open(files.path, options);
    check_columns(*training, *other, config, files.path);
    if (other->class_count() > 0 && training->class_names().empty() &&
        !other->class_names().empty()) {
      throw DataError(
          fmt::format("[csv] {}: its classes are {}, and those of {} are whole numbers from 0",
                      files.path, fmt::join(other->class_names(), ", "), config.path));
    }
    MoreData more{.data = other, .classes = other->class_count()};
    if (scaler) more.data = std::make_shared<ScaledDataset>(other, scaler);
    return more;
  };
  return all;
}

// A column of whole numbers is one number per sample, as NumPy's reshape(-1, 1) leaves them.
std::shared_ptr<TensorDataset> without_column(std::shared_ptr<TensorDataset> set) {
  const at::Tensor& target = set->target();
  if (target.scalar_type() != at::kLong || target.dim() != 2 || target.size(1) != 1) return set;
  return std::make_shared<TensorDataset>(set->data(), target.flatten());
}

// Of files that are opened without regard to others.
template <class Open>
FileData alike(const DataConfig& config, const Open& open) {
  const auto training = without_column(open(config));
  return {.training = training,
          .classes = classes_of(*training),
          .more = [open](const DataConfig& files) {
            const auto other = without_column(open(files));
            return MoreData{.data = other, .classes = classes_of(*other)};
          }};
}

// Data sets of two files each: samples and targets.
template <class Set>
FileData of_two_files(const DataConfig& config) {
  return alike(config, [](const DataConfig& files) {
    return std::make_shared<Set>(given(files.path, "path", files),
                                 given(files.targets_path, "targets_path", files));
  });
}

FileData tensors(const DataConfig& config) {
  return alike(config, [](const DataConfig& files) {
    return std::make_shared<checkpoint::TensorFileDataset>(
        given(files.path, "path", files),
        checkpoint::TensorFileOptions{.data = {files.inputs_key}, .targets = {files.targets_key}});
  });
}

FileData images(const DataConfig& config, const comm::World& world) {
  const ImagesConfig& keys = config.images;
  data::ImageFolderOptions options{
      .size = keys.size,
      .channels = keys.channels,
      .fit = keys.fit == "stretch" ? data::ImageFit::Stretch : data::ImageFit::Crop,
      .bad_images = keys.bad_images == "skip" ? data::BadImages::Skip : data::BadImages::Error};
  const auto open = [world](const std::string& path, const data::ImageFolderOptions& how) {
    auto set = std::make_shared<data::ImageFolder>(path, how);
    log_skipped(world, path, set->skipped(), set->first_skipped());
    return set;
  };
  const auto training = open(given(config.path, "path", config), options);
  options.classes = training->classes();
  const auto classes = std::ssize(options.classes);
  return {.training = training, .classes = classes, .more = [=](const DataConfig& files) {
            return MoreData{.data = open(files.path, options), .classes = classes};
          }};
}

FileData tokens(const DataConfig& config) {
  const data::TokenDatasetOptions options{.sequence_length = config.tokens.sequence_length,
                                          .type = text::token_type(config.tokens.dtype),
                                          .mask_boundaries = config.tokens.mask_boundaries};
  const auto training =
      std::make_shared<data::TokenDataset>(given(config.path, "path", config), options);
  FileData all{.training = training,
               .classes = training->files().vocabulary().value_or(0),
               .tokenizer = config.tokens.tokenizer,
               .separator = training->files().separator()};
  if (all.tokenizer.empty() && may_exist(config.path + "/tokenizer.json"))
    all.tokenizer = config.path;
  all.more = [=, first = config.path, classes = all.classes](const DataConfig& files) {
    const auto other = std::make_shared<data::TokenDataset>(files.path, options);
    const int64_t tokens = other->files().vocabulary().value_or(classes);
    if (tokens != classes) {
      throw ConfigError(fmt::format(
          "[config] {} has {} different tokens and {} {}: both have to be of one tokenizer", first,
          classes, files.path, tokens));
    }
    return MoreData{.data = other, .classes = classes};
  };
  return all;
}

FileData open_kind(const DataConfig& config, const comm::World& world) {
  if (config.kind == "csv") return csv(config, world);
  if (config.kind == "idx") return of_two_files<data::IdxDataset>(config);
  if (config.kind == "npy") return of_two_files<data::NpyDataset>(config);
  if (config.kind == "safetensors") return tensors(config);
  if (config.kind == "images") return images(config, world);
  if (config.kind == "tokens") return tokens(config);
  throw ConfigError(
      fmt::format("[config] data.kind = {} lies in no file that is known: csv, idx, "
                  "npy, safetensors, images, tokens",
                  config.kind));
}

}  // namespace

bool is_file_data(std::string_view kind) {
  return kind == "csv" || kind == "idx" || kind == "npy" || kind == "safetensors" ||
         kind == "images" || kind == "tokens";
}

FileData open_file_data(const DataConfig& config, const comm::World& world) {
  FileData all = open_kind(config, world);
  if (config.validation_path.empty()) return all;
  DataConfig files = config;
  files.path = config.validation_path;
  files.targets_path = config.validation_targets_path;
  if (config.kind == "npy" || config.kind == "idx") {
    given(files.targets_path, "validation_targets_path", config);
  }
  const MoreData other = all.more(files);
  all.validation = other.data;
  all.classes = std::max(all.classes, other.classes);
  return all;
}

}  // namespace lockstep::train
