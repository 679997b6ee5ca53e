#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "lockstep/core/error.h"
#include "lockstep/train/metrics.h"
#include "train/metrics/inputs.h"
#include "train/metrics/sums.h"

namespace lockstep::train {
namespace {

constexpr int64_t kDigits = ExactSum::kDigits;

// Exactly a * b, for products that neither overflow nor underflow.
void add_product(ExactSum& sum, double a, double b) {
  const double product = a * b;
  sum.add(product);
  sum.add(std::fma(a, b, -product));
}

// Of one column; all are weighted.
enum Sum : int64_t { kTargets, kSquares, kSquaredErrors, kErrors, kSums };

int64_t place_of(int64_t column, Sum sum) { return kDigits * (1 + column * kSums + sum); }

// Adds factor * value, a sum as three doubles: exactly but for what lies 2^-106 below its first.
void add_product(ExactSum& sum, double factor, ExactSum value) {
  for (int i = 0; i < 3; ++i) {
    const double part = value.value();
    add_product(sum, factor, part);
    value.add(-part);
  }
}

// The sum of w (y - mean)^2: sum of squares less 2 m (sum of y) plus (sum of weights) m^2, for m
// near the mean; what m lacks of the mean is of the order of its last bit, squared.
double squared_deviations(const ExactSum& squares, const ExactSum& sum, const ExactSum& weights) {
  const double mean = sum.value() / weights.value();
  const double square = mean * mean;
  ExactSum result = squares;
  add_product(result, -2 * mean, sum);
  add_product(result, square, weights);
  add_product(result, std::fma(mean, mean, -square), weights);
  return std::max(result.value(), 0.0);
}

at::Tensor columns(const at::Tensor& tensor) {
  const at::Tensor all = tensor.detach().to(at::kCPU, at::kDouble);
  return (all.dim() == 1 ? all.unsqueeze(1) : all).contiguous();
}

}  // namespace

std::string Regression::name() const {
  switch (score_) {
    case RegressionScore::Mse:
      return "mse";
    case RegressionScore::Rmse:
      return "rmse";
    case RegressionScore::Mae:
      return "mae";
    case RegressionScore::R2:
      return "r2";
  }
  throw ConfigError(fmt::format("[regression] {} is not a score", static_cast<int>(score_)));
}

// State: the number of samples, the sum of weights, then the sums of each column.
void Regression::update(const at::Tensor& outputs, const at::Tensor& targets,
                        const at::Tensor& weights) {
  const bool defined = outputs.defined() && targets.defined();
  if (!defined || outputs.is_complex() || targets.is_complex() || outputs.dim() < 1 ||
      outputs.dim() > 2 || targets.dim() < 1 || targets.dim() > 2) {
    throw ConfigError("[regression] needs real outputs and targets of n or n x columns");
  }
  const at::Tensor predicted = columns(outputs), wanted = columns(targets);
  if (predicted.sizes() != wanted.sizes()) {
    throw ConfigError(fmt::format("[regression] outputs [{}] and targets [{}] differ in shape",
                                  fmt::join(outputs.sizes(), ", "),
                                  fmt::join(targets.sizes(), ", ")));
  }
  const int64_t samples = wanted.size(0), width = wanted.size(1);
  const at::Tensor weight = sample_weights("regression", weights, {samples});
  const auto room = static_cast<size_t>(place_of(width, kTargets)) + 1;
  if (!state_.sums.empty() && state_.sums.size() != room) {
    throw ConfigError(fmt::format(
        "[regression] targets have {} columns, and those before another number", width));
  }
  begin_update();
  make_room(state_.sums, 1, 1 + width * kSums);
  ExactSum all;
  std::vector<ExactSum> sums(static_cast<size_t>(width * kSums));
  for (int64_t i = 0; i < samples; ++i) {
    const double w = weight.defined() ? weight.const_data_ptr<double>()[i] : 1.0;
    for (int64_t c = 0; c < width; ++c) {
      const double y = wanted.const_data_ptr<double>()[i * width + c];
      const double error = y - predicted.const_data_ptr<double>()[i * width + c];
      const double squared = w * error * error, square = w * y * y;
      if (!std::isfinite(squared) || !std::isfinite(square)) {
        note_fault(
            i, fmt::format("column {}: target {} and error {} give no finite square", c, y, error));
        return;
      }
      ExactSum* of_column = &sums[static_cast<size_t>(c * kSums)];
      add_product(of_column[kTargets], w, y);
      if (w == 1) {
        add_product(of_column[kSquares], y, y);
      } else {
        const double weighted = w * y;
        add_product(of_column[kSquares], weighted, y);
        add_product(of_column[kSquares], std::fma(w, y, -weighted), y);
      }
      of_column[kSquaredErrors].add(squared);
      of_column[kErrors].add(w * std::abs(error));
    }
    all.add(w);
  }
  state_.sums[0] += samples;
  add_at(state_.sums, 1, all);
  for (size_t i = 0; i < sums.size(); ++i) {
    add_at(state_.sums, 1 + kDigits * (1 + static_cast<int64_t>(i)), sums[i]);
  }
}

std::map<std::string, double> Regression::values_of(const MetricState& total) const {
  const auto width = (static_cast<int64_t>(total.sums.size()) - 1 - kDigits) / (kSums * kDigits);
  const double weight = sum_at(total.sums, 1).value();
  if (weight == 0 || width == 0) throw DataError("[regression] no sample counts");
  double mse = 0, rmse = 0, mae = 0, r2 = 0;
  for (int64_t c = 0; c < width; ++c) {
    const auto sum = [&](Sum which) { return sum_at(total.sums, 1 + place_of(c, which)); };
    const double squared = sum(kSquaredErrors).value();
    const double deviations =
        squared_deviations(sum(kSquares), sum(kTargets), sum_at(total.sums, 1));
    mse += squared / weight;
    rmse += std::sqrt(squared / weight);
    mae += sum(kErrors).value() / weight;
    r2 += deviations == 0 ? (squared == 0 ? 1.0 : 0.0) : 1 - squared / deviations;
  }
  const auto columns = static_cast<double>(width);
  if (total.sums[0] < 2) r2 = std::numeric_limits<double>::quiet_NaN();
  return {{"mse", mse / columns},
          {"rmse", rmse / columns},
          {"mae", mae / columns},
          {"r2", r2 / columns}};
}

}  // namespace lockstep::train
