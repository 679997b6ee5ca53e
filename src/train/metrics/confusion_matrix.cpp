#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>

#include "lockstep/core/error.h"
#include "lockstep/train/metrics.h"
#include "train/metrics/inputs.h"
#include "train/metrics/sums.h"

namespace lockstep::train {
namespace {

at::Tensor matrix_of(const MetricState& total) {
  const auto classes =
      static_cast<int64_t>(std::llround(std::sqrt(static_cast<double>(total.sums.size()))));
  return at::tensor(total.sums, at::kLong).view({classes, classes});
}

// 0 where the divisor is.
at::Tensor ratio(const at::Tensor& part, const at::Tensor& whole) {
  return at::where(whole == 0, at::zeros_like(part), part / whole);
}

ConfusionMatrix::Scores scores_of(const at::Tensor& counts) {
  const at::Tensor matrix = counts.to(at::kDouble);
  const at::Tensor right = matrix.diagonal().contiguous();
  const at::Tensor predicted = matrix.sum(0), support = matrix.sum(1);
  return {.precision = ratio(right, predicted),
          .recall = ratio(right, support),
          .f1 = ratio(2 * right, predicted + support),
          .support = support};
}

}  // namespace

std::string ConfusionMatrix::kind() const {
  return fmt::format("confusion_matrix with threshold {}{}", options_.threshold,
                     ignoring(options_.ignore_index));
}

ConfusionMatrix::ConfusionMatrix(const ConfusionMatrixOptions& options) : options_(options) {
  if (options_.classes < 0) {
    throw ConfigError(
        fmt::format("[confusion matrix] classes = {}: needs to be at least 1, or 0 "
                    "for as many as outputs have",
                    options_.classes));
  }
}

// State: the matrix, row by row.
void ConfusionMatrix::update(const at::Tensor& outputs, const at::Tensor& targets,
                             const at::Tensor& weights) {
  const ClassRows rows =
      class_rows("confusion matrix", outputs, targets, weights, options_.threshold);
  const int64_t classes = rows.outputs.size(1);
  if (options_.classes > 0 && options_.classes != classes) {
    throw ConfigError(fmt::format("[confusion matrix] outputs are for {} classes, not for {}",
                                  classes, options_.classes));
  }
  if (!state_.sums.empty() && static_cast<int64_t>(state_.sums.size()) != classes * classes) {
    throw ConfigError(fmt::format(
        "[confusion matrix] outputs are for {} classes, and those before for another number",
        classes));
  }
  if (rows.weights.defined() && !at::equal(rows.weights, rows.weights.round())) {
    throw ConfigError("[confusion matrix] weights need to be whole numbers: it counts samples");
  }
  begin_update();
  make_room(state_.sums, classes * classes, 0);
  each_sample(
      rows, options_.ignore_index,
      [&](const auto* row, int64_t target, double weight, int64_t) {
        const int64_t predicted = std::max_element(row, row + classes) - row;
        state_.sums[static_cast<size_t>(target * classes + predicted)] +=
            static_cast<int64_t>(weight);
      },
      [&](int64_t sample, const std::string& what) { note_fault(sample, what); });
}

at::Tensor ConfusionMatrix::matrix(const Group& group) const { return matrix_of(total(group)); }

ConfusionMatrix::Scores ConfusionMatrix::by_class(const Group& group) const {
  return scores_of(matrix(group));
}

// The means are over classes that are there or were predicted, as scikit-learn takes them.
std::map<std::string, double> ConfusionMatrix::values_of(const MetricState& total) const {
  const at::Tensor counts = matrix_of(total);
  const auto all = counts.sum().item<int64_t>();
  if (all == 0) throw DataError("[confusion matrix] no sample counts: all are ignored");
  const Scores scores = scores_of(counts);
  const at::Tensor present = (scores.support + counts.sum(0)) > 0;
  const auto mean = [&](const at::Tensor& values) {
    return values.masked_select(present).mean().item<double>();
  };
  return {{"accuracy", counts.diagonal().sum().item<double>() / static_cast<double>(all)},
          {"precision", mean(scores.precision)},
          {"recall", mean(scores.recall)},
          {"f1", mean(scores.f1)}};
}

}  // namespace lockstep::train
