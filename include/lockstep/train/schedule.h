// Learning rates over a whole run, as values.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "lockstep/parallel/lr_schedule.h"
#include "lockstep/parallel/lr_scheduler.h"

namespace lockstep::train {

// How the learning rate moves: with the run's steps, as a function of how many it has; or with a
// metric of the evaluations. Where another number of ranks resumes, whose steps take more samples
// or fewer, a schedule stands where it would if all of the run had been made on that number, so
// that it ends with the run; steps that are given by TrainerOptions::max_steps count as they are.
struct LearningRate {
  std::function<parallel::Schedule(int64_t steps)> schedule = nullptr;
  // With a metric: at each evaluation.
  std::optional<parallel::PlateauOptions> plateau = std::nullopt;
  std::string metric = "loss";
  // `schedule` has to know how many steps the run has, which TrainerOptions::max_time alone does
  // not say.
  bool needs_steps = false;
};

// The first `steps` steps rise linearly from 0, as transformers' schedules do: step s of them has
// s / steps of the rate that comes after them, which for one_cycle_lr() is a low one. What comes
// after counts its steps from there.
struct Warmup {
  int64_t steps = 0;
  double ratio = 0;  // the same, as a share of the run's steps, rounded up; not with `steps`
};

// The optimizer's own rate.
LearningRate constant(const Warmup& warmup = {});
// Then down to `lowest_lr` in a line, at the end of the run.
LearningRate linear_decay(const Warmup& warmup = {}, double lowest_lr = 0);
// Then down to `lowest_lr` along half a cosine wave.
LearningRate cosine_decay(const Warmup& warmup = {}, double lowest_lr = 0);
// Then any of lockstep/parallel/lr_schedule.h: follow(step_lr({.size = 1000}), {.steps = 100}).
LearningRate follow(parallel::Schedule schedule, const Warmup& warmup = {});
// As above, for a schedule that depends on how many steps are left after the warm-up.
LearningRate follow(std::function<parallel::Schedule(int64_t steps)> schedule,
                    const Warmup& warmup = {});
// Reduced when the metric has not become better for a number of evaluations.
LearningRate on_plateau(const parallel::PlateauOptions& options = {}, std::string metric = "loss");

}  // namespace lockstep::train
