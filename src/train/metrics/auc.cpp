#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/train/metrics.h"
#include "train/metrics/inputs.h"
#include "train/metrics/sums.h"

namespace lockstep::train {
namespace {

struct Scored {
  double score;
  bool positive;
  double weight;
};

[[noreturn]] void refuse(const at::Tensor& outputs, const at::Tensor& targets) {
  throw ConfigError(
      fmt::format("[auc] outputs [{}] and targets [{}]: needs those of two classes, n, n x 1 or "
                  "n x 2, and targets n",
                  fmt::join(outputs.sizes(), ", "), fmt::join(targets.sizes(), ", ")));
}

// A number per sample that grows with the probability of class 1.
at::Tensor scores_of(const at::Tensor& outputs, const at::Tensor& targets) {
  if (!outputs.defined() || !targets.defined())
    throw ConfigError("[auc] needs outputs and targets");
  at::Tensor scores = outputs.detach().to(at::kCPU, at::kDouble);
  if (outputs.is_complex()) refuse(outputs, targets);
  if (scores.dim() == 2 && scores.size(1) == 2 && targets.dim() == 1) {
    scores = scores.select(1, 1) - scores.select(1, 0);
  } else if (scores.dim() == 2 && scores.size(1) == 1) {
    scores = scores.select(1, 0);
  }
  const at::Tensor flat =
      targets.dim() == 2 && targets.size(1) == 1 ? targets.select(1, 0) : targets;
  if (scores.dim() != 1 || scores.sizes() != flat.sizes()) refuse(outputs, targets);
  return scores.contiguous();
}

}  // namespace

// Rows: score, class, weight. One sum, so that a rank that has had samples says so.
void Auc::update(const at::Tensor& outputs, const at::Tensor& targets, const at::Tensor& weights) {
  const at::Tensor scores = scores_of(outputs, targets);
  const at::Tensor classes = targets.detach().to(at::kCPU, at::kDouble).flatten().contiguous();
  const at::Tensor weight = sample_weights("auc", weights, scores.sizes());
  begin_update();
  make_room(state_.sums, 1, 0);
  state_.rows.reserve(state_.rows.size() + static_cast<size_t>(scores.numel()) * 3);
  for (int64_t i = 0; i < scores.numel(); ++i) {
    const double score = scores.const_data_ptr<double>()[i];
    const double target = classes.const_data_ptr<double>()[i];
    if (std::isnan(score)) {
      note_fault(i, "the output is NaN");
      return;
    }
    if (target != 0 && target != 1) {
      note_fault(i, fmt::format("target {} is neither 0 nor 1", target));
      return;
    }
    const double w = weight.defined() ? weight.const_data_ptr<double>()[i] : 1.0;
    state_.rows.insert(state_.rows.end(), {score, target, w});
  }
  state_.sums[0] += scores.numel();
}

std::map<std::string, double> Auc::values_of(const MetricState& total) const {
  std::vector<Scored> samples;
  samples.reserve(total.rows.size() / 3);
  for (size_t i = 0; i + 2 < total.rows.size(); i += 3) {
    samples.push_back({total.rows[i], total.rows[i + 1] == 1, total.rows[i + 2]});
  }
  std::sort(samples.begin(), samples.end(),
            [](const Scored& a, const Scored& b) { return a.score < b.score; });
  // Sums of those with equal scores are exact, so their order, which is the ranks', does not count.
  ExactSum positives, negatives, area;
  for (size_t begin = 0; begin < samples.size();) {
    ExactSum positive, negative;
    size_t end = begin;
    for (; end < samples.size() && samples[end].score == samples[begin].score; ++end) {
      (samples[end].positive ? positive : negative).add(samples[end].weight);
    }
    area.add(positive.value() * (negatives.value() + 0.5 * negative.value()));
    positives.add(positive);
    negatives.add(negative);
    begin = end;
  }
  const double pairs = positives.value() * negatives.value();
  if (pairs == 0) {
    throw DataError(
        fmt::format("[auc] needs samples of both classes: those of class 0 weigh {}, those of "
                    "class 1 weigh {}",
                    negatives.value(), positives.value()));
  }
  return {{"auc", area.value() / pairs}};
}

}  // namespace lockstep::train
