#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "lockstep/core/error.h"
#include "lockstep/parallel/hooks.h"
#include "parallel/hooks/state.h"

namespace lockstep::parallel {

TopK::TopK(TopKOptions options)
    : options_(options), residuals_(std::make_shared<HookState>("top_k")) {
  if (!(options.fraction > 0 && options.fraction <= 1)) {
    throw ConfigError(
        fmt::format("[top_k] fraction = {}: it must be above 0 and at most 1", options.fraction));
  }
}

comm::Work TopK::start(const Group& group, const Bucket& bucket) {
  const at::Tensor& flat = bucket.flat;
  residuals_->begin(bucket);
  if (options_.error_feedback) add_residuals(bucket, *residuals_);
  // Elements of a large parameter's bucket may be more than 32 bits can count.
  const at::ScalarType index =
      flat.numel() > std::numeric_limits<int>::max() ? at::kLong : at::kInt;
  std::vector<at::Tensor> chosen{at::empty({0}, flat.options().dtype(at::kLong))};
  for (size_t i = 0; i < bucket.gradients.size(); ++i) {
    const at::Tensor part = part_of(flat, bucket, i);
    if (part.numel() == 0) continue;
    const auto count =
        std::max<int64_t>(1, std::llround(options_.fraction * static_cast<double>(part.numel())));
    chosen.push_back(std::get<1>(part.abs().topk(count, 0, /*largest=*/true, /*sorted=*/false)) +
                     (part.storage_offset() - flat.storage_offset()));
  }
  const at::Tensor places = at::cat(chosen);
  const at::Tensor values = flat.index_select(0, places);
  if (options_.error_feedback) {
    stage_residuals(bucket, at::zeros_like(flat).index_copy_(0, places, values), *residuals_);
  }
  if (places.numel() == 0) {
    // As the last bucket it settles for the others, whose sums have to be there.
    return then(comm::Work(), [bucket, residuals = residuals_] {
      residuals->settle(bucket);
      return comm::Work();
    });
  }
  const at::Tensor sent_places = places.to(index);
  const auto all_places = at::empty({group.size(), places.numel()}, sent_places.options());
  const auto all_values = at::empty({group.size(), places.numel()}, values.options());
  const std::string label = fmt::format("bucket {}", bucket.index);
  bytes_ += static_cast<int64_t>(sent_places.nbytes() + values.nbytes());
  auto places_work = group.all_gather(all_places, sent_places, {.label = label});
  auto values_work = group.all_gather(all_values, values, {.label = label});
  return then(std::move(places_work), [=, residuals = residuals_] {
    return then(values_work, [=] {
      // Rank by rank, so that all ranks add in one order.
      flat.zero_();
      for (int64_t rank = 0; rank < all_values.size(0); ++rank)
        flat.index_add_(0, all_places[rank], all_values[rank]);
      flat.div_(all_values.size(0));
      residuals->settle(bucket);
      return comm::Work();
    });
  });
}

void TopK::attach(const Tensors& parameters) {
  residuals_->attach(options_.error_feedback ? residual_layout(parameters) : HookState::Layout());
}

void TopK::end_pass(const std::vector<std::string>& unused) {
  end_pass_of_residuals(unused, *residuals_);
}

Tensors TopK::state() const { return residuals_->tensors(); }
void TopK::restore(const Tensors& state) { residuals_->restore(state, {""}); }
void TopK::check(const Tensors& state) const { residuals_->check(state, {""}); }
void TopK::rescale(double factor) { residuals_->rescale(factor); }

}  // namespace lockstep::parallel
