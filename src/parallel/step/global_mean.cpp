#include "lockstep/parallel/global_mean.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>
#include <string_view>

#include "lockstep/core/error.h"
#include "parallel/ddp/gradients.h"
#include "parallel/lanes/plan.h"
#include "parallel/lanes/rules.h"

namespace lockstep::parallel {
namespace {

void check_count(double count) {
  if (count >= 0 && std::isfinite(count)) return;
  throw ConfigError(
      fmt::format("[global_mean] a count of {}: it must not be below 0, and finite", count));
}

void check_total(double total, const Group& group) {
  if (total > 0) return;
  throw ConfigError(
      fmt::format("[global_mean] none of the {} ranks has a sample, and nothing has no mean: leave "
                  "out the step on all ranks, or this term of a loss of several",
                  group.size()));
}

// Sums of whole numbers below 2^53 are exact, in any order.
double total_of(const Group& group, double count, std::string_view label) {
  check_count(count);
  if (count != std::floor(count)) {
    refuse_lanes(group, "global_mean with a count that is not a whole number",
                 "multiply all weights, so that they are");
  }
  at::Tensor total = at::full({1}, count, at::kDouble);
  group
      .all_reduce(total, ReduceOp::Sum,
                  {.label = label,
                   .advice = "or a rank without a batch in a Join does not make it: finish() takes "
                             "what follows backward() in a step"})
      .wait();
  check_total(total.item<double>(), group);
  return total.item<double>();
}

}  // namespace

int64_t global_count(const Group& group, int64_t count) {
  const double total = total_of(group, static_cast<double>(count), "global_count");
  if (total < 0x1p63) return static_cast<int64_t>(total);
  throw ConfigError(
      fmt::format("[global_mean] the counts of all ranks are {}: beyond int64", total));
}

double global_mean_scale(const Group& group, double count) {
  return static_cast<double>(addends_of(group)) / total_of(group, count, "global_mean_scale");
}

double global_mean(const Group& group, const at::Tensor& sum, double count) {
  check_count(count);
  if (!sum.defined() || sum.numel() != 1 || sum.is_complex()) {
    throw ConfigError("[global_mean] the sum needs to be one real number");
  }
  at::Tensor both = at::tensor({sum.item<double>(), count}, at::kDouble);
  group.all_reduce(both, ReduceOp::Sum, {.label = "global_mean"}).wait();
  check_total(both[1].item<double>(), group);
  return both[0].item<double>() / both[1].item<double>();
}

void GlobalMean::add(double count) {
  check_count(count);
  count_ += count;
}

double GlobalMean::scale_gradients_(const std::vector<at::Tensor>& parameters) {
  const double total = total_of(group_, count_, "GlobalMean");
  const at::NoGradGuard no_grad;
  const auto gradients = gradients_of(parameters);
  if (!gradients.empty()) {
    at::_foreach_mul_(gradients, static_cast<double>(addends_of(group_)) / total);
  }
  count_ = 0;
  return total;
}

}  // namespace lockstep::parallel
