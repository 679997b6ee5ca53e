#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/hash/counter.h"
#include "lockstep/core/error.h"
#include "lockstep/rl/scores.h"
#include "rl/scores/episodes.h"

namespace lockstep::rl {
namespace {

constexpr uint64_t kBootstrap = 0xB007;  // the purpose of these draws
constexpr int kResamples = 2000;

// C(c, k) / C(n, k), without either.
double chosen(int64_t c, int64_t n, int64_t k) {
  double product = 1;
  for (int64_t i = 0; i < k; ++i) {
    product *= static_cast<double>(std::max<int64_t>(c - i, 0)) / static_cast<double>(n - i);
  }
  return product;
}

void check(Trials trials, int64_t k) {
  if (trials.succeeded < 0 || trials.succeeded > trials.of || k < 1 || k > trials.of) {
    throw ConfigError(fmt::format("[rl] pass^k or pass@k: {} of {} trials succeeded, k is {}",
                                  trials.succeeded, trials.of, k));
  }
}

// Between the two nearest, as numpy.percentile.
double percentile(const std::vector<double>& sorted, double share) {
  const double at = share * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(at);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return std::lerp(sorted[below], sorted[above], at - static_cast<double>(below));
}

}  // namespace

double pass_hat_k(Trials trials, int64_t k) {
  check(trials, k);
  return chosen(trials.succeeded, trials.of, k);
}

double pass_at_k(Trials trials, int64_t k) {
  check(trials, k);
  return 1 - chosen(trials.of - trials.succeeded, trials.of, k);
}

Interval wilson(Trials trials) {
  if (trials.succeeded < 0 || trials.succeeded > trials.of || trials.of < 1) {
    throw ConfigError(
        fmt::format("[rl] wilson: {} of {} trials succeeded: needs at least one trial",
                    trials.succeeded, trials.of));
  }
  constexpr double z = 1.959963984540054;
  const auto n = static_cast<double>(trials.of);
  const double p = static_cast<double>(trials.succeeded) / n;
  const double scale = 1 + z * z / n;
  const double middle = (p + z * z / (2 * n)) / scale;
  const double half = z * std::sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / scale;
  return {.low = std::max(0.0, middle - half), .high = std::min(1.0, middle + half)};
}

Interval bootstrap_columns(
    std::span<const int64_t> tasks, uint64_t seed,
    const std::function<double(const std::vector<std::vector<int64_t>>& drawn)>& statistic) {
  std::vector<std::vector<int64_t>> drawn;
  for (const int64_t count : tasks) {
    if (count < 1) throw ConfigError("[rl] bootstrap: no tasks to draw from");
    drawn.emplace_back(static_cast<size_t>(count));
  }
  std::vector<double> values;
  for (int resample = 0; resample < kResamples; ++resample) {
    for (uint64_t column = 0; column < drawn.size(); ++column) {
      auto& of = drawn[column];
      for (size_t i = 0; i < of.size(); ++i) {
        const uint64_t draw = counter(seed, kBootstrap, resample, column << 32 | i);
        of[i] = static_cast<int64_t>(draw % of.size());
      }
    }
    values.push_back(statistic(drawn));
  }
  std::sort(values.begin(), values.end());
  return {.low = percentile(values, .025), .high = percentile(values, .975)};
}

Interval bootstrap(int64_t tasks, uint64_t seed,
                   const std::function<double(std::span<const int64_t>)>& statistic) {
  return bootstrap_columns({&tasks, 1}, seed,
                           [&](const auto& drawn) { return statistic(drawn.front()); });
}

}  // namespace lockstep::rl
