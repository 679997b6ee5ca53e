#include "lockstep/parallel/fused_sgd.h"

#include <ATen/ops/_fused_sgd.h>
#include <torch/types.h>

#include "checkpoint/file_memory.h"
#include "parallel/optim/fused.h"

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
  using torch::optim::SGDParamState;
  const auto parameters = fused_parameters(param_groups_, "fused_sgd");
  for (const auto& of_group : parameters) {
    for (const auto& parameter : of_group) {
      const auto found = state_.find(parameter.unsafeGetTensorImpl());
      if (found == state_.end()) continue;
      check_fused_state(static_cast<const SGDParamState&>(*found->second).momentum_buffer(),
                        parameter, "fused_sgd");
    }
  }
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(param_groups_[i].options());
    // The kernel overwrites the buffers of a first step, without dampening, and averages into the
    // others'.
    ByKind<SgdLists> first, next;
    for (const auto& parameter : parameters[i]) {
      SgdLists* lists = &next.of(parameter);
      if (options.momentum() != 0) {
        auto& state = state_[parameter.unsafeGetTensorImpl()];
        if (!state) state = std::make_unique<SGDParamState>();
        auto& mine = static_cast<SGDParamState&>(*state);
        if (!mine.momentum_buffer().defined()) {
          mine.momentum_buffer(checkpoint::zeros_beside(parameter));
          lists = &first.of(parameter);
        }
        // The parameter's memory format or dtype may have changed since.
        mine.momentum_buffer(laid_out_like(mine.momentum_buffer(), parameter));
        lists->buffers.push_back(mine.momentum_buffer());
      }
      lists->parameters.push_back(parameter);
      lists->gradients.push_back(laid_out_like(parameter.grad(), parameter));
    }
    for (const auto& [kind, lists] : first) lists.update(options, /*is_first_step=*/true);
    for (const auto& [kind, lists] : next) lists.update(options, /*is_first_step=*/false);
    count_versions(parameters[i]);
  }
  return loss;
}

}  // namespace lockstep::parallel
