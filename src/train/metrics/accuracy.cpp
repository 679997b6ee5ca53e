#include <fmt/format.h>
#include <torch/torch.h>

#include "lockstep/core/error.h"
#include "lockstep/train/metrics.h"
#include "train/metrics/inputs.h"
#include "train/metrics/sums.h"

namespace lockstep::train {
namespace {

// How many classes come before the target when they are ordered by output.
template <class Element>
int64_t rank_of(const Element* row, int64_t target, int64_t classes) {
  const Element own = row[target];
  int64_t before = 0;
  for (int64_t c = 0; c < classes; ++c) before += row[c] > own || (row[c] == own && c < target);
  return before;
}

}  // namespace

Accuracy::Accuracy(const AccuracyOptions& options) : options_(options) {
  if (options_.top_k < 1) {
    throw ConfigError(fmt::format("[accuracy] top_k = {}: needs to be at least 1", options_.top_k));
  }
}

std::string Accuracy::name() const {
  return options_.top_k == 1 ? "accuracy" : fmt::format("top_{}_accuracy", options_.top_k);
}

std::string Accuracy::kind() const {
  return fmt::format("{} with threshold {}{}", name(), options_.threshold,
                     ignoring(options_.ignore_index));
}

// State: the weights of those that are right, and all weights.
void Accuracy::update(const at::Tensor& outputs, const at::Tensor& targets,
                      const at::Tensor& weights) {
  const ClassRows rows = class_rows(name(), outputs, targets, weights, options_.threshold);
  const int64_t classes = rows.outputs.size(1);
  begin_update();
  make_room(state_.sums, 0, 2);
  ExactSum right, all;
  int64_t right_count = 0, count = 0;  // of those that weigh 1
  each_sample(
      rows, options_.ignore_index,
      [&](const auto* row, int64_t target, double weight, int64_t) {
        const bool is_right = rank_of(row, target, classes) < options_.top_k;
        if (weight == 1) {
          ++count;
          right_count += is_right;
        } else {
          all.add(weight);
          if (is_right) right.add(weight);
        }
      },
      [&](int64_t sample, const std::string& what) { note_fault(sample, what); });
  right.add(static_cast<double>(right_count));
  all.add(static_cast<double>(count));
  add_at(state_.sums, 0, right);
  add_at(state_.sums, ExactSum::kDigits, all);
}

std::map<std::string, double> Accuracy::values_of(const MetricState& total) const {
  const double all = sum_at(total.sums, ExactSum::kDigits).value();
  if (all == 0) throw DataError(fmt::format("[{}] no sample counts: all are ignored", name()));
  return {{name(), sum_at(total.sums, 0).value() / all}};
}

}  // namespace lockstep::train
