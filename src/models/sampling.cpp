#include "models/sampling.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <vector>

#include "core/hash/counter.h"
#include "lockstep/core/error.h"
#include "lockstep/parallel/random.h"

namespace lockstep::models {

double uniform(uint64_t seed, int64_t sample, int64_t position) {
  return unit_interval(parallel::stream_seed({.seed = seed, .step = position, .lane = sample}));
}

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

void refuse_broken(std::span<const float> logits) {
  size_t broken = 0, never = 0;  // minus infinity is a token that is never drawn
  for (const float x : logits) {
    broken += x < kInfinity ? 0 : 1;
    never += x == -kInfinity ? 1 : 0;
  }
  if (never == logits.size()) broken = never;
  if (broken == 0) return;
  throw Error(
      fmt::format("[generate] {} of {} logits are NaN or infinite, so no token can be chosen: the "
                  "model's parameters are damaged, or its numbers are too large for its dtype",
                  broken, logits.size()));
}

}  // namespace

int32_t sample_token(std::span<const float> logits, const GenerateOptions& options, double draw) {
  refuse_broken(logits);
  if (options.temperature == 0) {
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
  const size_t n = logits.size();
  const auto k = options.top_k > 0 ? std::min(n, static_cast<size_t>(options.top_k)) : n;
  const float most = *std::max_element(logits.begin(), logits.end());
  // Beyond float32's range the weights would be 0 / 0 or infinity / infinity.
  using Limits = std::numeric_limits<float>;
  const auto temperature =
      static_cast<float>(std::clamp<double>(options.temperature, Limits::min(), Limits::max()));
  std::vector<float> weights(n);
  for (size_t i = 0; i < n; ++i) weights[i] = std::exp((logits[i] - most) / temperature);
  if (k < n || options.top_p < 1) {
    // Of equal ones those with the lower numbers are more likely.
    std::vector<int32_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    const auto logit = [&](int32_t i) { return logits[static_cast<size_t>(i)]; };
    const auto likelier = [&](int32_t a, int32_t b) {
      const float x = logit(a), y = logit(b);
      return x != y ? x > y : a < b;
    };
    const auto place = [&](size_t i) { return order.begin() + static_cast<std::ptrdiff_t>(i); };
    if (k < n) std::nth_element(order.begin(), place(k), order.end(), likelier);
    size_t kept = k;
    if (options.top_p < 1) {
      double total = 0, sum = 0;
      for (size_t i = 0; i < k; ++i) total += weights[static_cast<size_t>(order[i])];
      // Few tokens have most of the probability: only those are sorted.
      size_t sorted = 0;
      for (kept = 0; kept < k && (kept == 0 || sum < options.top_p * total); ++kept) {
        if (kept == sorted) {
          const size_t end = std::min(k, std::max<size_t>(64, 4 * sorted));
          std::partial_sort(place(sorted), place(end), place(k), likelier);
          sorted = end;
        }
        sum += weights[static_cast<size_t>(order[kept])];
      }
    }
    for (size_t i = kept; i < n; ++i) weights[static_cast<size_t>(order[i])] = 0;
  }
  double total = 0;
  for (const float weight : weights) total += weight;
  double sum = 0;
  size_t last = 0;
  for (size_t i = 0; i < n; ++i) {
    if (weights[i] == 0) continue;
    last = i;
    sum += weights[i];
    if (sum > draw * total) break;
  }
  return static_cast<int32_t>(last);
}

}  // namespace lockstep::models
