#include "lockstep/train/file_data.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <utility>

#include "lockstep/checkpoint/tensor_file_dataset.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/data/csv.h"
#include "lockstep/data/idx_dataset.h"
#include "lockstep/data/image_folder.h"
#include "lockstep/data/npy.h"
#include "lockstep/data/token_dataset.h"
#include "train/run/slice.h"

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
  const auto open = [&](const std::string& path) {
    auto set = std::make_shared<data::CsvDataset>(path, options);
    log_skipped(world, path, set->skipped(), set->first_skipped());
    return set;
  };
  const auto training = open(given(config.path, "path", config));
  FileData all{.training = training, .classes = training->class_count()};
  if (!config.validation_path.empty()) {
    options.classes = training->class_names();
    const auto validation = open(config.validation_path);
    all.classes = std::max(all.classes, validation->class_count());
    all.validation = validation;
  }
  if (keys.scaling == "standard") {
    all.scaler = std::make_shared<StandardScaler>();
    // Not on what is held out for evaluation.
    const Slice part(training, {0, training->size() - held_out(config, training->size())});
    all.scaler->fit(part, world, {.names = training->feature_names()});
    all.training = std::make_shared<ScaledDataset>(all.training, all.scaler);
    if (all.validation) {
      all.validation = std::make_shared<ScaledDataset>(all.validation, all.scaler);
    }
  }
  return all;
}

// Data sets of two files each: samples and targets.
template <class Set>
FileData of_two_files(const DataConfig& config) {
  const auto training = std::make_shared<Set>(given(config.path, "path", config),
                                              given(config.targets_path, "targets_path", config));
  FileData all{.training = training, .classes = classes_of(*training)};
  if (!config.validation_path.empty()) {
    const auto validation = std::make_shared<Set>(
        config.validation_path,
        given(config.validation_targets_path, "validation_targets_path", config));
    all.classes = std::max(all.classes, classes_of(*validation));
    all.validation = validation;
  }
  return all;
}

FileData tensors(const DataConfig& config) {
  const checkpoint::TensorFileOptions options{.data = {config.inputs_key},
                                              .targets = {config.targets_key}};
  const auto training =
      std::make_shared<checkpoint::TensorFileDataset>(given(config.path, "path", config), options);
  FileData all{.training = training, .classes = classes_of(*training)};
  if (!config.validation_path.empty()) {
    const auto validation =
        std::make_shared<checkpoint::TensorFileDataset>(config.validation_path, options);
    all.classes = std::max(all.classes, classes_of(*validation));
    all.validation = validation;
  }
  return all;
}

FileData images(const DataConfig& config, const comm::World& world) {
  const ImagesConfig& keys = config.images;
  data::ImageFolderOptions options{
      .size = keys.size,
      .channels = keys.channels,
      .fit = keys.fit == "stretch" ? data::ImageFit::Stretch : data::ImageFit::Crop,
      .bad_images = keys.bad_images == "skip" ? data::BadImages::Skip : data::BadImages::Error};
  const auto open = [&](const std::string& path) {
    auto set = std::make_shared<data::ImageFolder>(path, options);
    log_skipped(world, path, set->skipped(), set->first_skipped());
    return set;
  };
  const auto training = open(given(config.path, "path", config));
  FileData all{.training = training, .classes = static_cast<int64_t>(training->classes().size())};
  if (!config.validation_path.empty()) {
    options.classes = training->classes();
    all.validation = open(config.validation_path);
  }
  return all;
}

FileData tokens(const DataConfig& config) {
  const data::TokenDatasetOptions options{.sequence_length = config.tokens.sequence_length,
                                          .type = text::token_type(config.tokens.dtype),
                                          .mask_boundaries = config.tokens.mask_boundaries};
  const auto training =
      std::make_shared<data::TokenDataset>(given(config.path, "path", config), options);
  FileData all{.training = training,
               .classes = training->files().vocabulary().value_or(0),
               .tokenizer = config.tokens.tokenizer};
  if (all.tokenizer.empty() && std::filesystem::exists(config.path + "/tokenizer.json")) {
    all.tokenizer = config.path;
  }
  if (!config.validation_path.empty()) {
    const auto validation = std::make_shared<data::TokenDataset>(config.validation_path, options);
    const int64_t other = validation->files().vocabulary().value_or(all.classes);
    if (other != all.classes) {
      throw ConfigError(fmt::format(
          "[config] {} has {} different tokens and {} {}: both have to be of one tokenizer",
          config.path, all.classes, config.validation_path, other));
    }
    all.validation = validation;
  }
  return all;
}

}  // namespace

bool is_file_data(std::string_view kind) {
  return kind == "csv" || kind == "idx" || kind == "npy" || kind == "safetensors" ||
         kind == "images" || kind == "tokens";
}

FileData open_file_data(const DataConfig& config, const comm::World& world) {
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

}  // namespace lockstep::train
