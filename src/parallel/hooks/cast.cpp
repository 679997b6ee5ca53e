#include <fmt/format.h>
#include <torch/types.h>

#include "comm/transport.h"
#include "lockstep/core/error.h"
#include "lockstep/parallel/hooks.h"
#include "parallel/hooks/state.h"

namespace lockstep::parallel {

CastHook::CastHook(at::ScalarType dtype, CastOptions options)
    : dtype_(dtype),
      options_(options),
      name_(fmt::format("cast to {}", comm::name_of(dtype))),
      residuals_(std::make_shared<HookState>(name_)) {
  if (!at::isFloatingType(dtype)) {
    throw ConfigError(
        fmt::format("[cast] gradients cannot be sent as {}: choose a floating-point dtype",
                    comm::name_of(dtype)));
  }
}

comm::Work CastHook::start(const Group& group, const Bucket& bucket) {
  const bool predivide = dtype_ == at::kHalf;
  at::Tensor& sent = memory_[{bucket.index, bucket.flat.numel()}];
  if (!sent.defined())
    sent = group.empty({bucket.flat.numel()}, bucket.flat.options().dtype(dtype_));
  if (options_.error_feedback) {
    residuals_->begin(bucket);
    add_residuals(bucket, *residuals_);
  }
  sent.copy_(predivide ? bucket.flat / group.size() : bucket.flat);
  if (options_.error_feedback) {
    const at::Tensor arrives = sent.to(bucket.flat.scalar_type());
    stage_residuals(bucket, predivide ? arrives * group.size() : arrives, *residuals_);
  }
  bytes_ += static_cast<int64_t>(sent.nbytes());
  return then(group.all_reduce(sent, predivide ? ReduceOp::Sum : ReduceOp::Average,
                               {.label = fmt::format("bucket {}", bucket.index)}),
              [bucket, sent, residuals = options_.error_feedback ? residuals_ : nullptr] {
                bucket.flat.copy_(sent);
                if (residuals) residuals->settle(bucket);
                return comm::Work();
              });
}

void CastHook::attach(const Tensors& parameters) {
  memory_.clear();  // the buckets of another model, or of another group
  residuals_->attach(options_.error_feedback ? residual_layout(parameters) : HookState::Layout());
}

void CastHook::end_pass(const std::vector<std::string>& unused) {
  end_pass_of_residuals(unused, *residuals_);
}

Tensors CastHook::state() const { return residuals_->tensors(); }
void CastHook::restore(const Tensors& state) { residuals_->restore(state, {""}); }
void CastHook::check(const Tensors& state) const { residuals_->check(state, {""}); }
void CastHook::rescale(double factor) { residuals_->rescale(factor); }

}  // namespace lockstep::parallel
