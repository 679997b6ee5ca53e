// The data sets that a configuration may name.
#include "lockstep/data/datasets.h"

#include <map>
#include <memory>
#include <string>

#include "lockstep/data/synthetic_regression.h"
#include "lockstep/train/file_data.h"
#include "train/run/builtin.h"

namespace lockstep::train {
namespace {

using data::Split;

// Images of 1 x 28 x 28, which linear layers take as well.
template <class Set>
RunData digits(const std::string& folder, const std::string& validation) {
  const data::ImageOptions options{.flatten = false};
  return {.training = std::make_shared<Set>(folder, Split::Train, options),
          .validation =
              std::make_shared<Set>(validation.empty() ? folder : validation, Split::Test, options),
          .classes = 10,
          .more = [options](const DataConfig& files) {
            return std::make_shared<Set>(files.path, Split::Train, options);
          }};
}

RunData fashion_mnist(const RunConfig& config, const comm::World&) {
  const auto& path = config.data.path;
  return digits<data::FashionMnist>(path.empty() ? "/usr/share/datasets/fashion-mnist" : path,
                                    config.data.validation_path);
}

RunData mnist(const RunConfig& config, const comm::World&) {
  return digits<data::Mnist>(config.data.path, config.data.validation_path);
}

RunData synthetic_regression(const RunConfig& config, const comm::World&) {
  const auto& given = config.data.synthetic;
  return {.training = std::make_shared<data::SyntheticRegression>(
              given.samples, data::SyntheticRegressionOptions{.slope = given.slope,
                                                              .intercept = given.intercept,
                                                              .noise = given.noise,
                                                              .seed = config.training.seed})};
}

RunData files(const RunConfig& config, const comm::World& world) {
  const FileData all = open_file_data(config.data, world);
  return {.training = all.training,
          .validation = all.validation,
          .classes = all.classes,
          .scaler = all.scaler,
          .tokenizer = all.tokenizer,
          .separator = all.separator,
          .more = [more = all.more](const DataConfig& files) { return more(files).data; }};
}

}  // namespace

std::map<std::string, Registry::MakeData> builtin_data() {
  return {{"csv", files},         {"fashion-mnist", fashion_mnist},
          {"idx", files},         {"images", files},
          {"mnist", mnist},       {"npy", files},
          {"safetensors", files}, {"synthetic-regression", synthetic_regression},
          {"tokens", files}};
}

}  // namespace lockstep::train
