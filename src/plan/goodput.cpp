#include "lockstep/plan/goodput.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/hash/mix.h"
#include "lockstep/core/error.h"

namespace lockstep::plan {
namespace {
constexpr int64_t kMostFailures = 100000;
constexpr double kMostCheckpoints = 1e8;  // which take a second
}  // namespace

double goodput(const Reliability& reliability, double interval) {
  const double mean = reliability.failure_interval();
  if (!(interval > 0)) return 0;
  const double segment = (interval + reliability.save) / mean;
  if (segment > 700 || reliability.restart / mean > 700) return 0;  // beyond what exp() can say
  return interval / (mean * std::exp(reliability.restart / mean) * std::expm1(segment));
}

double young_interval(const Reliability& reliability) {
  return std::sqrt(2 * reliability.save * reliability.failure_interval());
}

double daly_interval(const Reliability& reliability) {
  const double mean = reliability.failure_interval(), save = reliability.save;
  if (save >= 2 * mean) return mean;
  const double ratio = save / (2 * mean);
  return std::sqrt(2 * save * mean) * (1 + std::sqrt(ratio) / 3 + ratio / 9) - save;
}

double best_interval(const Reliability& reliability) {
  // goodput() rises to one maximum and falls. By golden section over logarithms, also of goodput():
  // where hardly anything gets done it is 0 for all intervals.
  constexpr double kGolden = 0.6180339887498949;
  const double mean = reliability.failure_interval();
  const auto score = [&](double logarithm) {
    const double segment = (std::exp(logarithm) + reliability.save) / mean;
    return logarithm - (segment > 30 ? segment : std::log(std::expm1(segment)));
  };
  double low = std::log(std::min(reliability.save, mean) / 1000), high = std::log(1000 * mean);
  for (int i = 0; i < 200; ++i) {
    const double a = high - kGolden * (high - low), b = low + kGolden * (high - low);
    const bool rises = score(a) < score(b);
    (rises ? low : high) = rises ? a : b;
  }
  return std::exp((low + high) / 2);
}

SimulatedRun simulate_run(const Reliability& reliability, double interval, double work,
                          uint64_t seed) {
  if (!(work / interval <= kMostCheckpoints)) {
    throw ConfigError(
        fmt::format("[simulate] a checkpoint after each {} seconds: more than {:.0f} checkpoints "
                    "in {:.6g} hours of work: give a longer --save-every, or fewer --work-hours",
                    interval, kMostCheckpoints, work / 3600));
  }
  SimulatedRun run;
  const double mean = reliability.failure_interval();
  uint64_t draws = 0;
  const auto next_failure = [&] {
    const auto bits = static_cast<double>(mix(mix(seed) ^ draws++) >> 11);
    return -mean * std::log((bits + 0.5) * 0x1p-53);
  };
  double until_failure = next_failure();
  while (run.done < work && run.failures < kMostFailures) {
    const double part = std::min(interval, work - run.done);
    const double segment = part + reliability.save;
    if (until_failure >= segment) {
      until_failure -= segment;
      run.seconds += segment;
      run.saving += reliability.save;
      run.done += part;
      continue;
    }
    run.seconds += until_failure;
    run.lost += until_failure;
    ++run.failures;
    // A failure during a restart begins it again.
    for (until_failure = next_failure(); until_failure < reliability.restart;
         until_failure = next_failure()) {
      run.seconds += until_failure;
      run.restarting += until_failure;
      ++run.failures;
      if (run.failures >= kMostFailures) return run;
    }
    run.seconds += reliability.restart;
    run.restarting += reliability.restart;
    until_failure -= reliability.restart;
  }
  if (run.done >= work) run.goodput = work / run.seconds;
  return run;
}

}  // namespace lockstep::plan
