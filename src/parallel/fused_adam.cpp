#include "lockstep/parallel/fused_adam.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <torch/types.h>

#include "parallel/fused.h"

namespace lockstep::parallel {
namespace {

// What the kernel takes: one list per role, over the parameters that have a gradient.
struct Lists {
  std::vector<at::Tensor> parameters, gradients, averages, squares, largest, steps;
};

template <typename State>
void append(Lists& lists, const at::Tensor& parameter, State& state, bool amsgrad) {
  if (!state.exp_avg().defined()) {
    state.exp_avg(at::zeros_like(parameter));
    state.exp_avg_sq(at::zeros_like(parameter));
  }
  if (amsgrad && !state.max_exp_avg_sq().defined()) {
    state.max_exp_avg_sq(at::zeros_like(parameter));
  }
  const int64_t step = state.step() + 1;
  state.step(step);
  // Parameters are nearly always at one step, whose tensor they then share.
  const bool same =
      !lists.steps.empty() && lists.steps.back().template item<float>() == static_cast<float>(step);
  lists.steps.push_back(same ? lists.steps.back()
                             : at::scalar_tensor(static_cast<double>(step), at::kFloat));
  lists.parameters.push_back(parameter);
  lists.gradients.push_back(laid_out_like(parameter.grad(), parameter));
  lists.averages.push_back(state.exp_avg());
  lists.squares.push_back(state.exp_avg_sq());
  if (amsgrad) lists.largest.push_back(state.max_exp_avg_sq());
}

// step() of both classes. `kernel` is at::_fused_adam_ or at::_fused_adamw_.
template <typename Options, typename State, typename States, typename Kernel>
void update(std::vector<torch::optim::OptimizerParamGroup>& groups, States& states, Kernel kernel) {
  const at::NoGradGuard no_grad;
  check_fused(groups, "fused_adam");
  for (auto& group : groups) {
    const auto& options = static_cast<const Options&>(group.options());
    Lists lists;
    for (const auto& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      auto& state = states[parameter.unsafeGetTensorImpl()];
      if (!state) state = std::make_unique<State>();
      append(lists, parameter, static_cast<State&>(*state), options.amsgrad());
    }
    if (!lists.parameters.empty()) kernel(lists, options);
  }
}

}  // namespace

at::Tensor FusedAdam::step(LossClosure closure) {
  using torch::optim::AdamOptions, torch::optim::AdamParamState;
  const at::Tensor loss = loss_of(closure);
  update<AdamOptions, AdamParamState>(param_groups_, state_, [](Lists& l, const AdamOptions& o) {
    at::_fused_adam_(l.parameters, l.gradients, l.averages, l.squares, l.largest, l.steps, o.lr(),
                     std::get<0>(o.betas()), std::get<1>(o.betas()), o.weight_decay(), o.eps(),
                     o.amsgrad(), /*maximize=*/false);
  });
  return loss;
}

at::Tensor FusedAdamW::step(LossClosure closure) {
  using torch::optim::AdamWOptions, torch::optim::AdamWParamState;
  const at::Tensor loss = loss_of(closure);
  update<AdamWOptions, AdamWParamState>(param_groups_, state_, [](Lists& l, const AdamWOptions& o) {
    at::_fused_adamw_(l.parameters, l.gradients, l.averages, l.squares, l.largest, l.steps, o.lr(),
                      std::get<0>(o.betas()), std::get<1>(o.betas()), o.weight_decay(), o.eps(),
                      o.amsgrad(), /*maximize=*/false);
  });
  return loss;
}

}  // namespace lockstep::parallel
