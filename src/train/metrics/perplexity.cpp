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

// -log softmax(row)[target], in float64.
template <class Element>
double loss_of(const Element* row, int64_t target, int64_t classes) {
  const auto largest = static_cast<double>(*std::max_element(row, row + classes));
  double sum = 0;
  for (int64_t c = 0; c < classes; ++c) sum += std::exp(static_cast<double>(row[c]) - largest);
  return std::log(sum) - (static_cast<double>(row[target]) - largest);
}

}  // namespace

std::string Perplexity::kind() const { return name() + ignoring(options_.ignore_index); }

// State: the weighted sum of losses, and of weights.
void Perplexity::update(const at::Tensor& outputs, const at::Tensor& targets,
                        const at::Tensor& weights) {
  const ClassRows rows = class_rows("perplexity", outputs, targets, weights, 0);
  const int64_t classes = rows.outputs.size(1);
  begin_update();
  make_room(state_.sums, 0, 2);
  ExactSum sum, all;
  const auto fault = [&](int64_t sample, const std::string& what) { note_fault(sample, what); };
  each_sample(
      rows, options_.ignore_index,
      [&](const auto* row, int64_t target, double weight, int64_t sample) {
        const double loss = weight * loss_of(row, target, classes);
        if (!std::isfinite(loss)) {
          fault(sample, fmt::format("the cross-entropy of target {} is {}", target, loss));
          return;
        }
        sum.add(loss);
        all.add(weight);
      },
      fault);
  add_at(state_.sums, 0, sum);
  add_at(state_.sums, ExactSum::kDigits, all);
}

void Perplexity::update(double cross_entropy, int64_t targets) {
  if (targets < 0) {
    throw ConfigError(fmt::format("[perplexity] a mean cross-entropy of {} targets", targets));
  }
  begin_update();
  make_room(state_.sums, 0, 2);
  if (targets == 0) return;  // the mean of nothing is NaN
  const double loss = cross_entropy * static_cast<double>(targets);
  if (!std::isfinite(loss)) {
    note_fault(0,
               fmt::format("the mean cross-entropy of {} targets is {}", targets, cross_entropy));
    return;
  }
  ExactSum sum, all;
  sum.add(loss);
  all.add(static_cast<double>(targets));
  add_at(state_.sums, 0, sum);
  add_at(state_.sums, ExactSum::kDigits, all);
}

std::map<std::string, double> Perplexity::values_of(const MetricState& total) const {
  const double all = sum_at(total.sums, ExactSum::kDigits).value();
  if (all == 0) throw DataError("[perplexity] no target counts: all are ignored");
  const double mean = sum_at(total.sums, 0).value() / all;
  return {{"perplexity", std::exp(mean)}, {"cross_entropy", mean}};
}

}  // namespace lockstep::train
