#include "lockstep/parallel/fused_sgd.h"

#include <ATen/ops/_fused_sgd.h>
#include <torch/types.h>

#include "parallel/fused.h"

namespace lockstep::parallel {
namespace {

// What the kernel takes: one list per role.
struct SgdLists {
  std::vector<at::Tensor> parameters, gradients, buffers;

  void update(const torch::optim::SGDOptions& o, bool is_first_step) const {
    if (parameters.empty()) return;
    at::_fused_sgd_(parameters, gradients, buffers, o.weight_decay(), o.momentum(), o.lr(),
                    o.dampening(), o.nesterov(), /*maximize=*/false, is_first_step);
  }
};

}  // namespace

at::Tensor FusedSGD::step(LossClosure closure) {
  const at::Tensor loss = loss_of(closure);
  const at::NoGradGuard no_grad;
  check_fused(param_groups_, "fused_sgd");
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(group.options());
    // The kernel overwrites the buffers of a first step, without dampening, and averages into the
    // others'.
    SgdLists first, next;
    for (const auto& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      SgdLists* lists = &next;
      if (options.momentum() != 0) {
        auto& state = state_[parameter.unsafeGetTensorImpl()];
        if (!state) state = std::make_unique<torch::optim::SGDParamState>();
        auto& mine = static_cast<torch::optim::SGDParamState&>(*state);
        if (!mine.momentum_buffer().defined()) {
          mine.momentum_buffer(at::empty_like(parameter));
          lists = &first;
        }
        lists->buffers.push_back(mine.momentum_buffer());
      }
      lists->parameters.push_back(parameter);
      lists->gradients.push_back(laid_out_like(parameter.grad(), parameter));
    }
    first.update(options, /*is_first_step=*/true);
    next.update(options, /*is_first_step=*/false);
  }
  return loss;
}

}  // namespace lockstep::parallel
