#include "lockstep/parallel/weight_average.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <map>
#include <string_view>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "parallel/layout/common_memory.h"

namespace lockstep::parallel {
namespace {

bool is_averaged(const at::Tensor& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

// What the average of a weight is kept in.
at::ScalarType type_of_average(const at::Tensor& weight) {
  if (weight.scalar_type() == at::kComplexHalf) return at::kComplexFloat;
  return weight.is_floating_point() && weight.element_size() < 4 ? at::kFloat
                                                                 : weight.scalar_type();
}

void check_decay(double decay, std::string_view what) {
  if (decay >= 0 && decay <= 1) return;
  throw ConfigError(fmt::format("[weight average] {} = {}: a number from 0 to 1", what, decay));
}

// Every operation rounds each element by itself, wherever it lies: an addition with a factor would
// be fused or not, as vectors end.
void move_towards(at::Tensor& average, const at::Tensor& weight, double by) {
  const at::ScalarType type = average.scalar_type();
  // A module that is converted to another dtype has weights of that one from then on.
  const bool is_flat = average.is_cpu() && (type == at::kFloat || type == at::kDouble) &&
                       type == type_of_average(weight) && weight.itemsize() > 1 &&
                       average.is_non_overlapping_and_dense() &&
                       weight.strides() == average.strides();
  if (!is_flat) {
    average.add_(weight.to(average.scalar_type()).sub(average).mul_(by));
    return;
  }
  // The same without memory for what is between.
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, weight.scalar_type(), "weight average", [&] {
        using Average = at::opmath_type<scalar_t>;
        Average* const averages = average.data_ptr<Average>();
        const scalar_t* const weights = weight.const_data_ptr<scalar_t>();
        const auto factor = static_cast<Average>(by);
        at::parallel_for(
            0, average.numel(), at::internal::GRAIN_SIZE, [&](int64_t begin, int64_t end) {
              for (int64_t i = begin; i < end; ++i) {
                const Average difference = static_cast<Average>(weights[i]) - averages[i];
                averages[i] += difference * factor;
              }
            });
      });
  average.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

WeightAverage::WeightAverage(const std::vector<at::Tensor>& weights, WeightAverageOptions options)
    : options_(std::move(options)) {
  check_decay(options_.decay.value_or(0), "decay");
  if (options_.start < 0 || options_.every < 1) {
    throw ConfigError(
        fmt::format("[weight average] start = {}, every = {}: 0 or more, and 1 or more",
                    options_.start, options_.every));
  }
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  std::map<const at::TensorImpl*, at::Tensor> known;
  for (const auto& weight : weights) {
    if (!weight.defined() || weight.layout() != at::kStrided) {
      throw ConfigError(fmt::format("[weight average] weight {} is {}", given_.size(),
                                    weight.defined() ? "sparse" : "undefined"));
    }
    at::Tensor& average = known[weight.unsafeGetTensorImpl()];
    if (!average.defined()) {
      average = weight.detach().to(type_of_average(weight), /*non_blocking=*/false, /*copy=*/true);
      weights_.push_back(weight);
      averages_.push_back(average);
    }
    given_.push_back(average);
  }
}

void WeightAverage::check(const char* what) const {
  if (is_applied_) {
    throw ConfigError(fmt::format("[weight average] {} while the average is applied", what));
  }
  for (size_t i = 0; i < weights_.size(); ++i) {
    const at::Tensor &weight = weights_[i], &average = averages_[i];
    if (weight.sizes() == average.sizes() && weight.device() == average.device()) continue;
    throw ConfigError(fmt::format(
        "[weight average] {}: weight {} had {} elements on {} and has {} on {}: construct the "
        "average where the model is as it will be trained",
        what, i, average.numel(), average.device().str(), weight.numel(), weight.device().str()));
  }
}

double WeightAverage::share_of_next() const {
  if (options_.decay_of) {
    const double decay = options_.decay_of(averaged_);
    check_decay(decay, fmt::format("decay_of({})", averaged_));
    return 1 - decay;
  }
  return options_.decay ? 1 - *options_.decay : 1.0 / static_cast<double>(averaged_ + 1);
}

void WeightAverage::update() {
  check("update()");
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  const bool is_begun = updates_ >= options_.start;
  const bool takes_part = !is_begun || (updates_ - options_.start) % options_.every == 0;
  const bool copies = !is_begun || averaged_ == 0;
  const double by = copies || !takes_part ? 1 : share_of_next();
  ++updates_;
  if (!takes_part) return;
  if (is_begun) ++averaged_;
  for (size_t i = 0; i < weights_.size(); ++i) {
    if (copies || !is_averaged(weights_[i])) {
      averages_[i].copy_(weights_[i]);
    } else {
      move_towards(averages_[i], weights_[i].detach(), by);
    }
  }
}

void WeightAverage::restart() {
  check("restart()");
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < weights_.size(); ++i) averages_[i].copy_(weights_[i]);
  updates_ = averaged_ = 0;
}

WeightAverage::Applied WeightAverage::apply() {
  check("apply()");
  if (std::ranges::any_of(weights_, &is_unsharded)) {
    throw ConfigError(
        "[weight average] apply() between an Fsdp's unshard() and reshard(): the model's "
        "parameters, which are whole, would keep values of their own: call it before unshard()");
  }
  return Applied(*this);
}

WeightAverage::Applied::Applied(WeightAverage& average) : average_(&average) {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> places;
  for (const auto& weight : average.weights_) {
    const at::Tensor copy = weight.detach().clone();
    // Other ranks begin and end earlier or later, and would find there what this one has written.
    const bool moves = is_common(weight);
    before_.push_back(moves ? weight.detach() : copy);
    places.push_back(moves ? copy : weight);
  }
  for (size_t i = 0; i < places.size(); ++i) {
    places[i].copy_(average.averages_[i]);
    if (!places[i].is_same(average.weights_[i])) average.weights_[i].set_data(places[i]);
  }
  average.is_applied_ = true;
}

WeightAverage::Applied::~Applied() {
  if (average_ == nullptr) return;
  average_->is_applied_ = false;
  try {
    const c10::InferenceMode normal(false);
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < before_.size(); ++i) {
      const at::Tensor& weight = average_->weights_[i];
      if (is_common(before_[i])) {
        weight.set_data(before_[i]);
      } else {
        weight.copy_(before_[i]);
      }
    }
  } catch (const std::exception& error) {
    log::error(fmt::format("[weight average] the weights did not get their values back: {}",
                           error.what()));
  }
}

}  // namespace lockstep::parallel
