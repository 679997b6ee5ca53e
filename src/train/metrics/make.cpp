#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include "core/nearest.h"
#include "lockstep/core/error.h"
#include "lockstep/train/metrics.h"

namespace lockstep::train {

std::unique_ptr<Metric> make_metric(std::string_view name, const MetricOptions& options) {
  if (name == "accuracy") {
    return std::make_unique<Accuracy>(
        AccuracyOptions{.ignore_index = options.ignore_index, .threshold = options.threshold});
  }
  if (name == "top_k") {
    return std::make_unique<Accuracy>(
        AccuracyOptions{.top_k = options.top_k, .ignore_index = options.ignore_index});
  }
  if (name == "confusion_matrix") {
    return std::make_unique<ConfusionMatrix>(
        ConfusionMatrixOptions{.classes = options.classes,
                               .ignore_index = options.ignore_index,
                               .threshold = options.threshold});
  }
  if (name == "auc") return std::make_unique<Auc>();
  if (name == "perplexity") {
    return std::make_unique<Perplexity>(PerplexityOptions{.ignore_index = options.ignore_index});
  }
  if (name == "mse") return std::make_unique<Regression>(RegressionScore::Mse);
  if (name == "rmse") return std::make_unique<Regression>(RegressionScore::Rmse);
  if (name == "mae") return std::make_unique<Regression>(RegressionScore::Mae);
  if (name == "r2") return std::make_unique<Regression>(RegressionScore::R2);
  if (name == "mean") return std::make_unique<Mean>();
  const std::vector<std::string> known{
      "accuracy", "top_k", "confusion_matrix", "auc", "perplexity", "mse", "rmse", "mae",
      "r2",       "mean"};
  throw ConfigError(fmt::format("[metrics] '{}' is unknown: use one of {}{}", name,
                                fmt::join(known, ", "),
                                hint_of(name, known, "; did you mean '", "'?")));
}

}  // namespace lockstep::train
