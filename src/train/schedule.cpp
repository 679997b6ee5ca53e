#include "lockstep/train/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::train {
namespace {

using parallel::Schedule;

int64_t warmup_steps(const Warmup& warmup, int64_t steps) {
  if (warmup.steps < 0 || warmup.ratio < 0 || warmup.ratio > 1 ||
      (warmup.steps > 0 && warmup.ratio > 0)) {
    throw ConfigError(
        fmt::format("[schedule] a warm-up of {} steps and of a share of {}: give one of them, at "
                    "least 0, and a share of at most 1",
                    warmup.steps, warmup.ratio));
  }
  if (warmup.steps > 0) return warmup.steps;
  return static_cast<int64_t>(std::ceil(warmup.ratio * static_cast<double>(steps)));
}

// After its warm-up `rest` makes a schedule of the steps that are left, which it may need to know.
LearningRate after(const Warmup& warmup, bool needs_steps,
                   std::function<Schedule(int64_t steps)> rest) {
  warmup_steps(warmup, 1);  // throws what is wrong with it, now
  const auto behind = [warmup, rest = std::move(rest)](int64_t steps) {
    const int64_t rising = warmup_steps(warmup, steps);
    Schedule schedule = rest(std::max<int64_t>(steps - rising, 1));
    if (rising == 0) return schedule;
    if (!schedule.lr) throw ConfigError("[schedule] the schedule has no function of the rate");
    Schedule whole;
    whole.lr = [rising, lr = schedule.lr](double base, int64_t step) {
      if (step >= rising) return lr(base, step - rising);
      return lr(base, 0) * static_cast<double>(step) / static_cast<double>(rising);
    };
    if (schedule.momentum) {
      whole.momentum = [rising, momentum = schedule.momentum](int64_t step) {
        return momentum(std::max<int64_t>(step - rising, 0));
      };
    }
    return whole;
  };
  return {.schedule = behind, .needs_steps = needs_steps || warmup.ratio > 0};
}

}  // namespace

LearningRate constant(const Warmup& warmup) {
  return after(warmup, false,
               [](int64_t) { return Schedule{.lr = [](double base, int64_t) { return base; }}; });
}

LearningRate linear_decay(const Warmup& warmup, double lowest_lr) {
  return after(warmup, true, [lowest_lr](int64_t steps) {
    return Schedule{.lr = [=](double base, int64_t step) {
      const double left =
          std::max(0.0, 1.0 - static_cast<double>(step) / static_cast<double>(steps));
      return lowest_lr + (base - lowest_lr) * left;
    }};
  });
}

LearningRate cosine_decay(const Warmup& warmup, double lowest_lr) {
  return after(warmup, true, [lowest_lr](int64_t steps) {
    Schedule schedule = parallel::cosine_lr({.steps = steps, .lowest_lr = lowest_lr});
    // It would rise again.
    return Schedule{.lr = [steps, lr = std::move(schedule.lr)](double base, int64_t step) {
      return lr(base, std::min(step, steps));
    }};
  });
}

LearningRate follow(Schedule schedule, const Warmup& warmup) {
  return after(warmup, false, [schedule = std::move(schedule)](int64_t) { return schedule; });
}

LearningRate follow(std::function<Schedule(int64_t steps)> schedule, const Warmup& warmup) {
  if (!schedule) throw ConfigError("[schedule] follow() was given an empty function");
  return after(warmup, true, std::move(schedule));
}

LearningRate on_plateau(const parallel::PlateauOptions& options, std::string metric) {
  return {.plateau = options, .metric = std::move(metric)};
}

}  // namespace lockstep::train
