#include "lockstep/parallel/global_mean.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "lockstep/core/error.h"
#include "parallel/ddp/gradients.h"
#include "parallel/lanes/plan.h"

namespace lockstep::parallel {
namespace {

void check_count(int64_t count) {
  if (count >= 0) return;
  throw ConfigError(fmt::format("[global_mean] a count of {}: it must not be below 0", count));
}

void check_total(int64_t total, const Group& group) {
  if (total >= 1) return;
  throw ConfigError(
      fmt::format("[global_mean] none of the {} ranks has a sample, and nothing has no mean: leave "
                  "out the step "
                  "on all ranks",
                  group.size()));
}

}  // namespace

int64_t global_count(const Group& group, int64_t count) {
  check_count(count);
  at::Tensor total = at::full({1}, count, at::kLong);
  group.all_reduce(total, ReduceOp::Sum, {.label = "global_count"}).wait();
  check_total(total.item<int64_t>(), group);
  return total.item<int64_t>();
}

double global_mean_scale(const Group& group, int64_t count) {
  return static_cast<double>(addends_of(group)) / static_cast<double>(global_count(group, count));
}

double global_mean(const Group& group, const at::Tensor& sum, int64_t count) {
  check_count(count);
  // A count below 2^53 is exact in float64.
  at::Tensor both = at::tensor({sum.item<double>(), static_cast<double>(count)}, at::kDouble);
  group.all_reduce(both, ReduceOp::Sum, {.label = "global_mean"}).wait();
  check_total(both[1].item<int64_t>(), group);
  return both[0].item<double>() / both[1].item<double>();
}

void GlobalMean::add(int64_t count) {
  check_count(count);
  count_ += count;
}

int64_t GlobalMean::scale_gradients_(const std::vector<at::Tensor>& parameters) {
  const int64_t total = global_count(group_, count_);
  const at::NoGradGuard no_grad;
  const auto gradients = gradients_of(parameters);
  if (!gradients.empty()) {
    at::_foreach_mul_(gradients,
                      static_cast<double>(addends_of(group_)) / static_cast<double>(total));
  }
  count_ = 0;
  return total;
}

}  // namespace lockstep::parallel
