#include "lockstep/parallel/lr_schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "lockstep/core/error.h"

namespace lockstep::parallel {
namespace {

void need(bool fits, std::string_view schedule, std::string_view what) {
  if (!fits) throw ConfigError(fmt::format("[{}] {}", schedule, what));
}

Schedule of_factor(std::function<double(int64_t)> factor) {
  return {.lr = [factor = std::move(factor)](double base, int64_t step) {
    return base * factor(step);
  }};
}

// From `high` at 0 to `low` at 1.
double half_cosine(double high, double low, double position) {
  return low + (high - low) * (1 + std::cos(std::numbers::pi * position)) / 2;
}

// Where among increasing milestones a step is: how many it has reached.
int64_t reached(const std::vector<int64_t>& milestones, int64_t step) {
  return std::upper_bound(milestones.begin(), milestones.end(), step) - milestones.begin();
}

// One value that goes from knot to knot: knots[i] at ends[i].
struct Path {
  std::vector<double> ends;  // in steps; the first is 0
  std::vector<double> knots;
  Anneal anneal;

  double at(int64_t step) const {
    size_t phase = 1;
    while (phase + 1 < ends.size() && static_cast<double>(step) > ends[phase]) ++phase;
    const double position =
        (static_cast<double>(step) - ends[phase - 1]) / (ends[phase] - ends[phase - 1]);
    const double from = knots[phase - 1], to = knots[phase];
    return anneal == Anneal::Cosine ? half_cosine(from, to, position)
                                    : from + (to - from) * position;
  }
};

}  // namespace

Schedule constant_lr(const ConstantOptions& o) {
  need(o.factor >= 0 && std::isfinite(o.factor) && o.steps >= 0, "constant_lr",
       "factor and steps must not be below 0");
  return of_factor([o](int64_t step) { return step < o.steps ? o.factor : 1.0; });
}

Schedule linear_lr(const LinearOptions& o) {
  need(o.steps >= 1 && o.start_factor >= 0 && o.end_factor >= 0, "linear_lr",
       "steps must be at least 1 and the factors not below 0");
  return of_factor([o](int64_t step) {
    const double position =
        static_cast<double>(std::min(step, o.steps)) / static_cast<double>(o.steps);
    return o.start_factor + (o.end_factor - o.start_factor) * position;
  });
}

Schedule step_lr(const StepOptions& o) {
  need(o.size >= 1 && std::isfinite(o.gamma), "step_lr",
       "size must be at least 1, and gamma finite");
  return of_factor([o](int64_t step) { return std::pow(o.gamma, step / o.size); });
}

Schedule multi_step_lr(std::vector<int64_t> milestones, double gamma) {
  need(std::is_sorted(milestones.begin(), milestones.end()), "multi_step_lr",
       "the milestones must be in increasing order");
  need(std::isfinite(gamma), "multi_step_lr", "gamma must be finite");
  return of_factor([milestones = std::move(milestones), gamma](int64_t step) {
    return std::pow(gamma, reached(milestones, step));
  });
}

Schedule exponential_lr(double gamma) {
  need(std::isfinite(gamma), "exponential_lr", "gamma must be finite");
  return of_factor([gamma](int64_t step) { return std::pow(gamma, step); });
}

Schedule polynomial_lr(const PolynomialOptions& o) {
  need(o.steps >= 1 && o.power >= 0 && std::isfinite(o.power), "polynomial_lr",
       "steps must be at least 1, and power finite and not below 0");
  return of_factor([o](int64_t step) {
    const double done = static_cast<double>(std::min(step, o.steps)) / static_cast<double>(o.steps);
    return std::pow(1 - done, o.power);
  });
}

Schedule cosine_lr(const CosineOptions& o) {
  need(o.steps >= 1 && std::isfinite(o.lowest_lr), "cosine_lr",
       "steps must be at least 1, and lowest_lr finite");
  return {.lr = [o](double base, int64_t step) {
    return half_cosine(base, o.lowest_lr, static_cast<double>(step) / static_cast<double>(o.steps));
  }};
}

Schedule cosine_restarts_lr(const CosineRestartsOptions& o) {
  need(o.first_steps >= 1 && o.multiplier >= 1 && std::isfinite(o.lowest_lr), "cosine_restarts_lr",
       "first_steps and multiplier must be at least 1, and lowest_lr finite");
  return {.lr = [o](double base, int64_t step) {
    int64_t length = o.first_steps;
    if (o.multiplier == 1) step %= length;
    for (; step >= length; length *= o.multiplier) step -= length;
    return half_cosine(base, o.lowest_lr, static_cast<double>(step) / static_cast<double>(length));
  }};
}

Schedule one_cycle_lr(const OneCycleOptions& o) {
  need(o.steps >= 1 && o.rising >= 0 && o.rising <= 1 && o.div_factor > 0 && o.final_div_factor > 0,
       "one_cycle_lr", "steps must be at least 1, rising within [0, 1], the div factors above 0");
  const double rising = o.rising * static_cast<double>(o.steps);
  Path lr{.ends = {0.0, rising - 1}, .knots = {1 / o.div_factor, 1.0}, .anneal = o.anneal};
  Path momentum{.ends = {}, .knots = {o.max_momentum, o.base_momentum}, .anneal = o.anneal};
  if (o.three_phase) {
    lr.ends.push_back(2 * rising - 2);
    lr.knots.push_back(1 / o.div_factor);
    momentum.knots.push_back(o.max_momentum);
  }
  lr.ends.push_back(static_cast<double>(o.steps - 1));
  lr.knots.push_back(1 / o.div_factor / o.final_div_factor);
  momentum.knots.push_back(o.max_momentum);
  momentum.ends = lr.ends;
  for (size_t i = 1; i < lr.ends.size(); ++i) {
    need(lr.ends[i] != lr.ends[i - 1], "one_cycle_lr",
         fmt::format("a phase of no step: rising = {} of {} steps", o.rising, o.steps));
  }

  Schedule schedule{.lr = [lr, steps = o.steps](double base, int64_t step) {
    if (step > steps) {
      throw ConfigError(fmt::format(
          "[one_cycle_lr] step {} of a schedule of {}: give it the steps of the whole training",
          step, steps));
    }
    return base * lr.at(step);
  }};
  if (o.cycle_momentum) schedule.momentum = [momentum](int64_t step) { return momentum.at(step); };
  return schedule;
}

Schedule sequential_lr(std::vector<Schedule> schedules, std::vector<int64_t> milestones) {
  need(schedules.size() == milestones.size() + 1, "sequential_lr",
       fmt::format("{} schedules need {} milestones, not {}", schedules.size(),
                   std::max<size_t>(schedules.size(), 1) - 1, milestones.size()));
  need(std::is_sorted(milestones.begin(), milestones.end()), "sequential_lr",
       "the milestones must be in increasing order");
  for (const auto& schedule : schedules) {
    need(schedule.lr != nullptr, "sequential_lr", "a schedule has no function of the rate");
    need(!schedule.momentum, "sequential_lr",
         "a schedule that moves the momentum cannot be a part");
  }
  return {.lr = [schedules = std::move(schedules), milestones = std::move(milestones)](
                    double base, int64_t step) {
    const auto part = static_cast<size_t>(reached(milestones, step));
    return schedules[part].lr(base, part == 0 ? step : step - milestones[part - 1]);
  }};
}

}  // namespace lockstep::parallel
