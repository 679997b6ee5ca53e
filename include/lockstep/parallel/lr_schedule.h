// Learning rates as functions of the step, with the names, parameters and values of PyTorch's
// torch.optim.lr_scheduler (within 1e-12; these are closed forms, Python multiplies step by step).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "lockstep/core/compiler.h"

namespace lockstep::parallel {

// A learning rate from a parameter group's own one (`base`) and the number of steps taken; and a
// momentum, where the schedule moves that too. Any function of its arguments alone will do:
// Schedule{.lr = [](double base, int64_t step) ...}. It is called for any steps, in any order, and
// LrScheduler throws ConfigError for a rate that is not finite.
struct Schedule {
  std::function<double(double base, int64_t step)> lr;
  std::function<double(int64_t step)> momentum = nullptr;
};

// Options of constant_lr().
struct ConstantOptions {
  double factor = 1.0 / 3;
  int64_t steps = 5;  // then the group's own rate; 0: that at once, where PyTorch keeps the factor
};

// Options of linear_lr().
struct LinearOptions {
  double start_factor = 1.0 / 3;
  double end_factor = 1.0;
  int64_t steps = 5;  // then end_factor
};

// Options of step_lr().
struct StepOptions {
  int64_t size = 1;  // steps between two multiplications
  double gamma = 0.1;
};

// Options of polynomial_lr().
struct PolynomialOptions {
  int64_t steps = 5;  // then 0
  double power = 1.0;
};

// Options of cosine_lr().
struct CosineOptions {
  int64_t steps = 1;  // from the group's rate to the lowest; then up again
  double lowest_lr = 0;
};

// Options of cosine_restarts_lr().
struct CosineRestartsOptions {
  int64_t first_steps = 1;  // until the first restart
  int64_t multiplier = 1;   // of the steps until each next one
  double lowest_lr = 0;
};

// The curve between two rates.
enum class Anneal { Cosine, Linear };

// Smith and Topin, "Super-Convergence", 2017. The group's own rate is the peak.
struct OneCycleOptions {
  int64_t steps = 1;    // of the whole training; a step beyond throws
  double rising = 0.3;  // share of them
  Anneal anneal = Anneal::Cosine;
  double div_factor = 25.0;       // the first rate = peak / div_factor
  double final_div_factor = 1e4;  // the last = the first / final_div_factor
  bool three_phase = false;       // down to the first rate as fast as up, then to the last
  bool cycle_momentum = true;     // SGD's and RMSprop's momentum, Adam's and AdamW's beta1
  double base_momentum = 0.85;
  double max_momentum = 0.95;
};

// A schedule for an LrScheduler, named as PyTorch's. Each of these functions throws ConfigError for
// numbers that make no schedule.
Schedule constant_lr(const ConstantOptions& options = {});
// Warm-up: linear_lr({.start_factor = 0.01, .steps = 1000}).
Schedule linear_lr(const LinearOptions& options = {});
// Multiplied by gamma every `size` steps.
Schedule step_lr(const StepOptions& options);
// Multiplied by gamma at each milestone, which are in increasing order.
Schedule multi_step_lr(std::vector<int64_t> milestones, double gamma = 0.1);
// Multiplied by gamma at each step.
Schedule exponential_lr(double gamma);
// Down to 0 as a power of the steps that are left.
Schedule polynomial_lr(const PolynomialOptions& options = {});
// Down to the lowest rate along half a cosine wave.
Schedule cosine_lr(const CosineOptions& options);
// Loshchilov and Hutter, "SGDR", ICLR 2017.
Schedule cosine_restarts_lr(const CosineRestartsOptions& options);
// Up to the peak, then far down, in one cycle.
Schedule one_cycle_lr(const OneCycleOptions& options);
// The i-th schedule from milestone i - 1 on, which is its step 0: one milestone fewer than
// schedules.
Schedule sequential_lr(std::vector<Schedule> schedules, std::vector<int64_t> milestones);

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::constant_lr;
using parallel::cosine_lr;
using parallel::cosine_restarts_lr;
using parallel::exponential_lr;
using parallel::linear_lr;
using parallel::multi_step_lr;
using parallel::one_cycle_lr;
using parallel::polynomial_lr;
using parallel::Schedule;
using parallel::sequential_lr;
using parallel::step_lr;
}  // namespace lockstep
