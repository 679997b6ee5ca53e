// Moves an optimizer's learning rates, step by step.
#pragma once

#include <torch/optim/optimizer.h>

#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/parallel/lr_schedule.h"

namespace lockstep::parallel {

// How a learning rate grows with the number of ranks, whose batches together are a larger one.
enum class LrScaling {
  None,
  Linear,  // Goyal et al., "Accurate, Large Minibatch SGD", 2017; for SGD, with a warm-up
  Sqrt,    // Krizhevsky, "One weird trick", 2014; the usual choice for Adam
};

// The rate for the ranks' batches together: `lr`, times size(), or times its square root.
double scaled_lr(double lr, const Group& group, LrScaling scaling);

// For a checkpoint.
struct LrSchedulerState {
  int64_t step = 0;
  std::vector<double> base_lrs;  // by parameter group
};

// Sets the rate of each of the optimizer's parameter groups from the one it had at construction.
// Works with every torch::optim::Optimizer. Nothing is communicated: ranks that call step() equally
// often have the same rates.
class LrScheduler {
 public:
  // The rates become those of step 0. The optimizer must outlive the scheduler. Throws ConfigError
  // for a Schedule without a rate, and when the schedule moves the momentum of an optimizer that
  // has none.
  LrScheduler(torch::optim::Optimizer& optimizer, Schedule schedule);

  // After optimizer.step(). A group added meanwhile begins with its own rate. Throws ConfigError
  // when the optimizer has fewer groups than before, since it cannot know which of them are left.
  // That, and what the schedule throws, as for a step after its last, leaves step and rates as they
  // were.
  void step();

  // The group's current rate.
  double lr(size_t group = 0) const;

  // For a checkpoint: what restore() takes back. A group added since step() is in it. Throws for a
  // lost group as step() does.
  LrSchedulerState state() const;
  // Sets step and rates. Throws ConfigError when the number of groups differs, and what the
  // schedule throws for the step; nothing has changed then.
  void restore(const LrSchedulerState& state);
  // Throws as restore() would, and changes nothing.
  void check(const LrSchedulerState& state) const;

 private:
  std::vector<double> rates(const LrSchedulerState& state) const;
  void apply(LrSchedulerState state);

  torch::optim::Optimizer& optimizer_;
  Schedule schedule_;
  LrSchedulerState state_;
};

// Which metric is the better one.
enum class Better { Lower, Higher };
// Whether PlateauOptions::threshold is a share of the best metric or a distance from it.
enum class Threshold { Relative, Absolute };

// PyTorch's defaults.
struct PlateauOptions {
  Better better = Better::Lower;
  double factor = 0.1;      // of each reduction, below 1
  int64_t patience = 10;    // steps without a better metric that are tolerated
  double threshold = 1e-4;  // by which a metric has to be better to count
  Threshold threshold_mode = Threshold::Relative;
  int64_t cooldown = 0;  // steps after a reduction that do not count
  double lowest_lr = 0;
  double eps = 1e-8;  // a reduction smaller than this is not made
};

// For a checkpoint, with the optimizer's rates beside it.
struct PlateauState {
  double best = 0;
  int64_t bad_steps = 0;
  int64_t cooldown_left = 0;
};

// torch.optim.lr_scheduler.ReduceLROnPlateau over ranks.
class ReduceLrOnPlateau {
 public:
  // Throws ConfigError for a factor that is not below 1.
  ReduceLrOnPlateau(torch::optim::Optimizer& optimizer, const Group& group,
                    const PlateauOptions& options = {});

  // The metric is averaged over the group, so that all ranks decide the same from the same bits;
  // with lanes it must be the same number on all (ConfigError), as LaneMean::mean() is. Every rank
  // calls it: one all_reduce of one float64. Returns that average.
  double step(double metric);

  // For a checkpoint: what restore() takes back.
  const PlateauState& state() const { return state_; }
  void restore(const PlateauState& state) { state_ = state; }

 private:
  double agree(double metric) const;
  bool is_better(double metric) const;

  torch::optim::Optimizer& optimizer_;
  Group group_;
  PlateauOptions options_;
  PlateauState state_;
};

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::LrScaling;
using parallel::LrScheduler;
using parallel::LrSchedulerState;
using parallel::PlateauOptions;
using parallel::PlateauState;
using parallel::ReduceLrOnPlateau;
using parallel::scaled_lr;
}  // namespace lockstep
