// Section `data` of a configuration as data sets: tables, arrays, tensors, images and tokens in
// files.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/comm/world.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/standard_scaler.h"
#include "lockstep/train/model_config.h"

namespace lockstep::train {

// Further files of the same kind.
struct MoreData {
  std::shared_ptr<const data::Dataset> data = nullptr;
  int64_t classes = 0;  // as FileData's
};

// What the files hold.
struct FileData {
  std::shared_ptr<const data::Dataset> training = nullptr;
  std::shared_ptr<const data::Dataset> validation = nullptr;  // null: no file was given for it
  // Targets are numbers below it: classes, or tokens. 0: they are values, or tokens of which the
  // files do not say how many there are.
  int64_t classes = 0;
  // csv with scaling standard: measured on the training data, applied to both as their batches are
  // made. Track it: Checkpointer::track("scaler", *scaler).
  std::shared_ptr<data::StandardScaler> scaler = nullptr;
  // tokens: the file or folder of what made them; empty: not known.
  std::string tokenizer = {};
  // Of tokens: the one after each document, where their folder says so.
  std::optional<int64_t> separator = {};
  // Opens the files at `path` and `targets_path` of what it is given: with the classes and the
  // scaling of `training`, whose columns they have to have.
  std::function<MoreData(const DataConfig&)> more = nullptr;
};

// Whether open_file_data() knows the kind: csv, idx, npy, safetensors, images, tokens.
bool is_file_data(std::string_view kind);

// Opens what `config` describes. Every rank calls it (with scaling it communicates). Throws what
// the data sets throw, and ConfigError for a kind that it does not know or a path that is missing.
// What was left out by `bad_rows` or `bad_images` is logged by rank 0.
FileData open_file_data(const DataConfig& config, const comm::World& world);

}  // namespace lockstep::train
