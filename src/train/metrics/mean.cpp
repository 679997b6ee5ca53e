#include <fmt/format.h>
#include <torch/torch.h>

#include <cmath>

#include "lockstep/core/error.h"
#include "lockstep/train/metrics.h"
#include "train/metrics/inputs.h"
#include "train/metrics/sums.h"

namespace lockstep::train {

// State: the weighted sum, the sum of the weights.
void Mean::update(const at::Tensor& numbers, const at::Tensor& targets, const at::Tensor& weights) {
  if (!numbers.defined() || numbers.is_complex() || targets.defined()) {
    throw ConfigError(fmt::format("[{}] a mean is of real numbers, without targets", name_));
  }
  const at::Tensor all = numbers.detach().to(at::kCPU, at::kDouble).contiguous().flatten();
  const at::Tensor weight = sample_weights(name_, weights, numbers.sizes());
  begin_update();
  make_room(state_.sums, 0, 2);
  ExactSum sum, total;
  const auto* number = all.const_data_ptr<double>();
  for (int64_t i = 0; i < all.numel(); ++i) {
    const double w = weight.defined() ? weight.const_data_ptr<double>()[i] : 1.0;
    const double product = w * number[i];
    if (!std::isfinite(product)) {
      note_fault(i, fmt::format("{}, with weight {}, is not finite", number[i], w));
      return;
    }
    sum.add(product);
    total.add(w);
  }
  add_at(state_.sums, 0, sum);
  add_at(state_.sums, ExactSum::kDigits, total);
}

void Mean::update(double number, double weight) {
  update(at::scalar_tensor(number, at::kDouble), {}, at::scalar_tensor(weight, at::kDouble));
}

std::map<std::string, double> Mean::values_of(const MetricState& total) const {
  const double count = sum_at(total.sums, ExactSum::kDigits).value();
  if (count == 0) throw DataError(fmt::format("[{}] all weights are 0", name_));
  return {{name_, sum_at(total.sums, 0).value() / count}};
}

}  // namespace lockstep::train
