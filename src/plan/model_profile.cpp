#include "lockstep/plan/model_profile.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>

#include "lockstep/core/error.h"
#include "plan/sizes.h"
#include "plan/small_models.h"

namespace lockstep::plan {
namespace {

namespace fs = std::filesystem;

int64_t folders_in(const std::string& path) {
  std::error_code error;
  int64_t count = 0;
  for (const auto& entry : fs::directory_iterator(path, error)) count += entry.is_directory();
  return count;
}

// A folder of `lockstep tokenize` says it; 0: it does not.
int64_t vocabulary_of(const std::string& path) {
  std::ifstream file(fs::path(path) / "tokens.json");
  const auto json = nlohmann::json::parse(file, nullptr, false);
  const auto found = json.is_object() ? json.find("vocabulary") : json.end();
  return json.is_object() && found != json.end() && found->is_number_integer()
             ? found->get<int64_t>()
             : 0;
}

bool is_narrow(const train::RunConfig& config) {
  const auto& dtype = config.mixed_precision.dtype;
  return dtype == "bf16" || dtype == "fp16";
}

}  // namespace

int64_t elements_of(const std::vector<int64_t>& sizes) {
  int64_t product = 1;
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(product, size, &product) || product > kMostElements) {
      throw ConfigError(fmt::format("[plan] {} elements are more than the {} of the largest model",
                                    fmt::join(sizes, " x "), kMostElements));
    }
  }
  return product;
}

int64_t ProfileUnit::trained() const {
  return std::accumulate(parameters.begin(), parameters.end(), int64_t{0});
}

double ProfileUnit::backward_passes() const {
  if (!has_backward) return 0;
  return frozen == 0 ? 2 : 1 + static_cast<double>(trained()) / static_cast<double>(elements());
}

int64_t ModelProfile::elements() const {
  int64_t all = 0;
  for (const auto& unit : units) all += unit.elements();
  return all;
}

int64_t ModelProfile::trained() const {
  int64_t all = 0;
  for (const auto& unit : units) all += unit.trained();
  return all;
}

double ModelProfile::forward_flops() const {
  double all = 0;
  for (const auto& unit : units) all += unit.flops;
  return all;
}

SampleSizes sample_sizes(const train::RunConfig& config) {
  const auto& data = config.data;
  if (data.kind == "mnist" || data.kind == "fashion-mnist") return {{1, 28, 28}, 10};
  if (data.kind == "synthetic-regression") return {{1}, 1};
  if (data.kind == "images") {
    return {{data.images.channels, data.images.size, data.images.size}, folders_in(data.path)};
  }
  if (data.kind == "tokens") {
    return {{data.tokens.sequence_length}, vocabulary_of(data.path)};
  }
  throw ConfigError(
      fmt::format("[plan] data.kind {} does not say how large a sample is: give --sample, such as "
                  "784 or 3x32x32, "
                  "and --outputs, the classes or target columns",
                  data.kind));
}

ModelProfile profile_of(const train::RunConfig& config, const SampleSizes& sample) {
  const auto& model = config.model;
  const auto precision = is_narrow(config) ? Precision::Narrow : Precision::Float;
  if (model.kind == "linear") return linear_profile(model.linear, sample, precision);
  if (model.kind == "mlp") return mlp_profile(model.mlp, sample, precision);
  if (model.kind == "convnet") return convnet_profile(model.convnet, sample, precision);
  if (model.kind == "resnet18") return resnet18_profile(model.resnet18, sample, precision);
  if (model.kind != "transformer") {
    throw ConfigError(fmt::format(
        "[plan] model.kind {} is the program's own: call lockstep::plan::measure() in it",
        model.kind));
  }
  auto sizes = model.transformer;
  if (!sizes.pretrained.empty()) {
    throw ConfigError(
        "[plan] model.pretrained: give the sizes instead, such as --model qwen3-4b, or by --set "
        "model.layers=...");
  }
  if (sizes.vocabulary == 0) sizes.vocabulary = sample.outputs;
  const int64_t tokens = sample.data.empty() ? sizes.max_length : sample.data.front();
  return transformer_profile(sizes, tokens, precision);
}

}  // namespace lockstep::plan
