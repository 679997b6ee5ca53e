#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "lockstep/core/error.h"
#include "lockstep/rl/scores.h"
#include "rl/scores/episodes.h"

namespace lockstep::rl {
namespace {

std::optional<double> mean_if_any(const std::vector<double>& values) {
  return values.empty() ? std::nullopt : std::optional(mean(values));
}

void check(std::span<const std::vector<double>> r, const ComparedWith& other) {
  const size_t stages = r.empty() ? 0 : r.size() - 1;
  const auto fits = [&](const std::vector<double>& row) { return row.size() == stages; };
  const bool others_fit =
      (!other.random || fits(*other.random)) && (!other.joint || fits(*other.joint));
  if (stages == 0 || !std::all_of(r.begin(), r.end(), fits) || !others_fit) {
    throw ConfigError(fmt::format(
        "[rl] continual_scores: {} rows; T stages need T + 1 rows of T columns, and T values of an "
        "untrained model and of a joint run",
        r.size()));
  }
}

}  // namespace

double mean(const std::vector<double>& values) {
  const double sum = std::accumulate(values.begin(), values.end(), 0.0);
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

ContinualScores continual_scores(std::span<const std::vector<double>> r,
                                 const ComparedWith& other) {
  check(r, other);
  const size_t stages = r.size() - 1;
  std::vector<double> own, back, forward, random, forgotten, joint, cross;
  ContinualScores scores;
  for (size_t j = 0; j < stages; ++j) {
    const double learnt = r[j + 1][j];
    own.push_back(learnt);
    scores.gain_per_stage.push_back(learnt - r[j][j]);
    if (other.joint) joint.push_back((*other.joint)[j] - learnt);
    if (j > 0) {
      forward.push_back(r[j][j] - r[0][j]);
      if (other.random) random.push_back(r[j][j] - (*other.random)[j]);
    }
    for (size_t i = 1; i <= j; ++i) cross.push_back(r[i][j] - r[0][j]);
    if (j + 1 == stages) continue;
    back.push_back(r[stages][j] - learnt);
    double best = r[1][j];
    for (size_t i = 1; i < stages; ++i) best = std::max(best, r[i][j]);
    forgotten.push_back(best - r[stages][j]);
  }
  scores.acc = mean(r[stages]);
  scores.learning_accuracy = mean(own);
  scores.bwt = mean_if_any(back);
  scores.fwt = mean_if_any(forward);
  scores.fwt_random = mean_if_any(random);
  scores.forgetting = mean_if_any(forgotten);
  scores.intransigence = mean_if_any(joint);
  scores.cross_domain = mean_if_any(cross);
  return scores;
}

double area_under(std::span<const double> curve) {
  if (curve.empty()) throw ConfigError("[rl] area_under: a curve needs a point");
  if (curve.size() == 1) return curve[0];
  double area = 0;
  for (size_t i = 0; i + 1 < curve.size(); ++i) area += (curve[i] + curve[i + 1]) / 2;
  return area / static_cast<double>(curve.size() - 1);
}

double early_area(std::span<const double> curve) {
  if (curve.empty()) throw ConfigError("[rl] early_area: a curve needs a point");
  const auto first = curve.first(std::min<size_t>(curve.size(), 11));
  return mean({first.begin(), first.end()});
}

}  // namespace lockstep::rl
