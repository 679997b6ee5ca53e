#include <fmt/format.h>
#include <torch/types.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel/hooks.h"
#include "parallel/hook_state.h"

namespace lockstep::parallel {

CastHook::CastHook(at::ScalarType dtype, CastOptions options)
    : dtype_(dtype), options_(options), name_(fmt::format("cast to {}", c10::toString(dtype))) {
  if (!at::isFloatingType(dtype)) {
    throw ConfigError(
        fmt::format("[cast] gradients cannot be sent as {}: choose a floating-point dtype",
                    c10::toString(dtype)));
  }
}

comm::Work CastHook::start(const Group& group, const Bucket& bucket) {
  const bool predivide = dtype_ == at::kHalf;
  at::Tensor& sent = memory_[{bucket.index, bucket.flat.numel()}];
  if (!sent.defined())
    sent = group.empty({bucket.flat.numel()}, bucket.flat.options().dtype(dtype_));
  if (options_.error_feedback) add_residuals(bucket, residuals_);
  sent.copy_(predivide ? bucket.flat / group.size() : bucket.flat);
  if (options_.error_feedback) {
    const at::Tensor arrives = sent.to(bucket.flat.scalar_type());
    keep_residuals(bucket, predivide ? arrives * group.size() : arrives, residuals_);
  }
  bytes_ += static_cast<int64_t>(sent.nbytes());
  return then(group.all_reduce(sent, predivide ? ReduceOp::Sum : ReduceOp::Average,
                               {.tag = fmt::format("bucket {}", bucket.index)}),
              [flat = bucket.flat, sent] {
                flat.copy_(sent);
                return comm::Work();
              });
}

void CastHook::restore(const Tensors& state) { residuals_ = checked_state(name(), state, {""}); }

}  // namespace lockstep::parallel
