#include "lockstep/parallel/lr_scheduler.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>

#include "comm/transport.h"
#include "lockstep/core/error.h"

namespace lockstep::parallel {
namespace {

using torch::optim::OptimizerOptions;

template <typename Options>
bool set_beta1(OptimizerOptions& options, double value) {
  auto* adam = dynamic_cast<Options*>(&options);
  if (adam != nullptr) adam->betas({value, std::get<1>(adam->betas())});
  return adam != nullptr;
}

template <typename Options>
bool set_plain_momentum(OptimizerOptions& options, double value) {
  auto* plain = dynamic_cast<Options*>(&options);
  if (plain != nullptr) plain->momentum(value);
  return plain != nullptr;
}

void set_momentum(OptimizerOptions& options, double value) {
  using namespace torch::optim;
  if (set_plain_momentum<SGDOptions>(options, value) || set_beta1<AdamOptions>(options, value) ||
      set_beta1<AdamWOptions>(options, value) ||
      set_plain_momentum<RMSpropOptions>(options, value)) {
    return;
  }
  throw ConfigError(
      "[lr_scheduler] the schedule moves the momentum, and the optimizer is none of SGD, RMSprop, "
      "Adam, "
      "AdamW: set cycle_momentum = false");
}

}  // namespace

double scaled_lr(double lr, const Group& group, LrScaling scaling) {
  switch (scaling) {
    case LrScaling::Linear:
      return lr * group.size();
    case LrScaling::Sqrt:
      return lr * std::sqrt(group.size());
    case LrScaling::None:
      break;
  }
  return lr;
}

LrScheduler::LrScheduler(torch::optim::Optimizer& optimizer, Schedule schedule)
    : optimizer_(optimizer), schedule_(std::move(schedule)) {
  if (!schedule_.lr) throw ConfigError("[lr_scheduler] the schedule has no function of the rate");
  apply(state());
}

void LrScheduler::step() {
  LrSchedulerState next = state();
  ++next.step;
  apply(std::move(next));
}

LrSchedulerState LrScheduler::state() const {
  const auto& groups = optimizer_.param_groups();
  LrSchedulerState now = state_;
  if (groups.size() < now.base_lrs.size()) {
    throw ConfigError(
        fmt::format("[lr_scheduler] the optimizer has {} parameter groups, and had {}: construct "
                    "another LrScheduler when one is removed",
                    groups.size(), now.base_lrs.size()));
  }
  for (size_t i = now.base_lrs.size(); i < groups.size(); ++i) {
    now.base_lrs.push_back(groups[i].options().get_lr());
  }
  return now;
}

std::vector<double> LrScheduler::rates(const LrSchedulerState& state) const {
  std::vector<double> rates;
  for (const double base : state.base_lrs) {
    rates.push_back(schedule_.lr(base, state.step));
    if (std::isfinite(rates.back())) continue;
    throw ConfigError(fmt::format("[lr_scheduler] the schedule gives the rate {} at step {}",
                                  rates.back(), state.step));
  }
  return rates;
}

void LrScheduler::apply(LrSchedulerState state) {
  auto& groups = optimizer_.param_groups();
  const auto rates = this->rates(state);
  state_ = std::move(state);
  for (size_t i = 0; i < groups.size(); ++i) {
    groups[i].options().set_lr(rates[i]);
    if (schedule_.momentum) set_momentum(groups[i].options(), schedule_.momentum(state_.step));
  }
}

double LrScheduler::lr(size_t group) const {
  return optimizer_.param_groups().at(group).options().get_lr();
}

void LrScheduler::restore(const LrSchedulerState& state) {
  check(state);
  apply(state);
}

void LrScheduler::check(const LrSchedulerState& state) const {
  if (state.base_lrs.size() != optimizer_.param_groups().size()) {
    throw ConfigError(
        fmt::format("[lr_scheduler] restore: a state of {} parameter groups for an optimizer of {}",
                    state.base_lrs.size(), optimizer_.param_groups().size()));
  }
  rates(state);
}

ReduceLrOnPlateau::ReduceLrOnPlateau(torch::optim::Optimizer& optimizer, const Group& group,
                                     const PlateauOptions& options)
    : optimizer_(optimizer), group_(group), options_(options) {
  if (!(options.factor < 1)) {
    throw ConfigError(
        fmt::format("[reduce_lr_on_plateau] factor = {}: it must be below 1", options.factor));
  }
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  state_.best = options.better == Better::Lower ? kInfinity : -kInfinity;
}

// PyTorch's comparison: relative to the best as a factor, also below zero.
bool ReduceLrOnPlateau::is_better(double metric) const {
  const double sign = options_.better == Better::Lower ? 1 : -1;
  const double bar = options_.threshold_mode == Threshold::Relative
                         ? state_.best * (1 - sign * options_.threshold)
                         : state_.best - sign * options_.threshold;
  return sign * metric < sign * bar;
}

// An average of equal numbers may be another one, which depends on how many they are.
double ReduceLrOnPlateau::agree(double metric) const {
  at::Tensor average = at::full({1}, metric, at::kDouble);
  if (group_.transport().lanes() == 0) {
    group_.all_reduce(average, ReduceOp::Average, {.label = "ReduceLrOnPlateau"}).wait();
    return average.item<double>();
  }
  at::Tensor least_and_most = at::tensor({metric, -metric}, at::kDouble);
  group_.all_reduce(least_and_most, ReduceOp::Min, {.label = "ReduceLrOnPlateau"}).wait();
  const double least = least_and_most[0].item<double>(), most = -least_and_most[1].item<double>();
  if (least == most || least != least) return least;
  throw ConfigError(
      fmt::format("[reduce_lr_on_plateau] the metric is {} on one rank and {} on another, and with "
                  "lanes it may not depend on the number of ranks: give LaneMean::mean()",
                  least, most));
}

double ReduceLrOnPlateau::step(double metric) {
  const double agreed = agree(metric);
  if (is_better(agreed)) {
    state_.best = agreed;
    state_.bad_steps = 0;
  } else {
    ++state_.bad_steps;
  }
  if (state_.cooldown_left > 0) {
    --state_.cooldown_left;
    state_.bad_steps = 0;
  }
  if (state_.bad_steps <= options_.patience) return agreed;
  for (auto& group : optimizer_.param_groups()) {
    const double old = group.options().get_lr();
    const double lower = std::max(old * options_.factor, options_.lowest_lr);
    if (old - lower > options_.eps) group.options().set_lr(lower);
  }
  state_.cooldown_left = options_.cooldown;
  state_.bad_steps = 0;
  return agreed;
}

}  // namespace lockstep::parallel
