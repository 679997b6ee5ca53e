#include "lockstep/data/synthetic_regression.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

TensorDataset make(int64_t size, const SyntheticRegressionOptions& options) {
  if (size < 1 || !(options.noise >= 0)) {
    throw ConfigError(fmt::format(
        "[synthetic regression] {} samples with noise {}: need at least 1 and noise >= 0", size,
        options.noise));
  }
  at::Generator generator = at::detail::createCPUGenerator(static_cast<uint64_t>(options.seed));
  const auto x = at::rand({size, 1}, generator, at::kFloat) * 2 - 1;
  const auto noise = at::randn({size, 1}, generator, at::kFloat);
  return {x, options.slope * x + options.intercept + options.noise * noise};
}

}  // namespace

SyntheticRegression::SyntheticRegression(int64_t size, const SyntheticRegressionOptions& options)
    : TensorDataset(make(size, options)) {}

}  // namespace lockstep::data
