#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>

#include "lockstep/core/error.h"
#include "lockstep/parallel/hooks.h"
#include "parallel/hook_state.h"

namespace lockstep::parallel {

TopK::TopK(TopKOptions options) : options_(options) {
  if (!(options.fraction > 0 && options.fraction <= 1)) {
    throw ConfigError(
        fmt::format("[top_k] fraction = {}: it must be above 0 and at most 1", options.fraction));
  }
}

comm::Work TopK::start(const Group& group, const Bucket& bucket) {
  const at::Tensor& flat = bucket.flat;
  if (flat.numel() == 0) return {};
  if (options_.error_feedback) add_residuals(bucket, residuals_);
  const auto count =
      std::max<int64_t>(1, std::llround(options_.fraction * static_cast<double>(flat.numel())));
  const at::Tensor places =
      std::get<1>(flat.abs().topk(count, 0, /*largest=*/true, /*sorted=*/false)).to(at::kInt);
  const at::Tensor values = flat.index_select(0, places);
  if (options_.error_feedback) {
    keep_residuals(bucket, at::zeros_like(flat).index_copy_(0, places.to(at::kLong), values),
                   residuals_);
  }
  const auto all_places = at::empty({group.size(), count}, places.options());
  const auto all_values = at::empty({group.size(), count}, values.options());
  const std::string tag = fmt::format("bucket {}", bucket.index);
  bytes_ += static_cast<int64_t>(places.nbytes() + values.nbytes());
  auto places_work = group.all_gather(all_places, places, {.tag = tag});
  auto values_work = group.all_gather(all_values, values, {.tag = tag});
  return then(std::move(places_work), [=] {
    return then(values_work, [=] {
      // Rank by rank, so that all ranks add in one order.
      flat.zero_();
      for (int64_t rank = 0; rank < all_values.size(0); ++rank)
        flat.index_add_(0, all_places[rank], all_values[rank]);
      flat.div_(all_values.size(0));
      return comm::Work();
    });
  });
}

void TopK::restore(const Tensors& state) { residuals_ = checked_state(name(), state, {""}); }

}  // namespace lockstep::parallel
