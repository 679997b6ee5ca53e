#include "lockstep/parallel/fused_adam.h"

#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <torch/types.h>

#include <cmath>
#include <type_traits>

#include "checkpoint/file_memory.h"
#include "comm/device/capture.h"
#include "core/divided_up.h"
#include "lockstep/core/shard.h"
#include "parallel/optim/adam_kernel.h"
#include "parallel/optim/fused.h"

namespace lockstep::parallel {
namespace {

using torch::optim::AdamOptions, torch::optim::AdamParamState;
using torch::optim::AdamWOptions, torch::optim::AdamWParamState;

template <typename Options>
constexpr bool kDecoupled = std::is_same_v<Options, AdamWOptions>;

// One parameter with all that a step takes.
struct Item {
  at::Tensor parameter, gradient, average, square, largest;
  int64_t step;
};

template <typename State>
Item item_of(const at::Tensor& parameter, State& state, bool amsgrad) {
  if (!state.exp_avg().defined()) {
    state.exp_avg(checkpoint::zeros_beside(parameter));
    state.exp_avg_sq(checkpoint::zeros_beside(parameter));
  }
  if (amsgrad && !state.max_exp_avg_sq().defined()) {
    state.max_exp_avg_sq(checkpoint::zeros_beside(parameter));
  }
  // The parameter's memory format or dtype may have changed since.
  state.exp_avg(laid_out_like(state.exp_avg(), parameter));
  state.exp_avg_sq(laid_out_like(state.exp_avg_sq(), parameter));
  if (amsgrad) state.max_exp_avg_sq(laid_out_like(state.max_exp_avg_sq(), parameter));
  state.step(state.step() + 1);
  return {.parameter = parameter,
          .gradient = laid_out_like(parameter.grad(), parameter),
          .average = state.exp_avg(),
          .square = state.exp_avg_sq(),
          .largest = amsgrad ? state.max_exp_avg_sq() : at::Tensor(),
          .step = state.step()};
}

// Whether our own kernel can do it.
bool is_plain(const Item& item) {
  return adam_kernel() != nullptr && !item.largest.defined() &&
         item.parameter.scalar_type() == at::kFloat && item.parameter.is_cpu();
}

template <typename Options>
void update_plain(const Item& item, const Options& options) {
  const double beta1 = std::get<0>(options.betas()), beta2 = std::get<1>(options.betas());
  const auto taken = static_cast<double>(item.step);
  const double decay = options.weight_decay();
  const AdamStep step{
      .keep = static_cast<float>(kDecoupled<Options> ? 1 - options.lr() * decay : 1),
      .decay = static_cast<float>(kDecoupled<Options> ? 0 : decay),
      .beta2 = static_cast<float>(beta2),
      .new_average = static_cast<float>(1 - beta1),
      .new_square = static_cast<float>(1 - beta2),
      .size = static_cast<float>(options.lr() / (1 - std::pow(beta1, taken))),
      .root_scale = static_cast<float>(std::sqrt(1 - std::pow(beta2, taken))),
      .eps = static_cast<float>(options.eps())};
  const AdamElements all{.parameter = item.parameter.mutable_data_ptr<float>(),
                         .gradient = item.gradient.const_data_ptr<float>(),
                         .average = item.average.mutable_data_ptr<float>(),
                         .square = item.square.mutable_data_ptr<float>(),
                         .count = item.parameter.numel()};
  const int64_t blocks = divided_up(all.count, kAdamBlock);
  constexpr int64_t kBlocksATask = 32;
  at::parallel_for(0, blocks, kBlocksATask, [&](int64_t first, int64_t last) {
    const int64_t at = first * kAdamBlock;
    adam_kernel()(step, {all.parameter + at, all.gradient + at, all.average + at, all.square + at,
                         std::min(last * kAdamBlock, all.count) - at});
  });
}

// What torch's kernels take: one list per role.
struct Lists {
  std::vector<at::Tensor> parameters, gradients, averages, squares, largest, steps;
  int64_t last_step = 0;

  void add(const Item& item) {
    // Parameters are nearly always at one step, whose tensor they then share.
    const bool same = !steps.empty() && last_step == item.step;
    steps.push_back(same ? steps.back()
                         : at::scalar_tensor(static_cast<float>(item.step),
                                             item.parameter.options().dtype(at::kFloat)));
    last_step = item.step;
    parameters.push_back(item.parameter);
    gradients.push_back(item.gradient);
    averages.push_back(item.average);
    squares.push_back(item.square);
    if (item.largest.defined()) largest.push_back(item.largest);
  }
};

template <typename Options>
void update(const Lists& l, const Options& o) {
  if (l.parameters.empty()) return;
  const auto kernel = [&](auto fused) {
    fused(l.parameters, l.gradients, l.averages, l.squares, l.largest, l.steps, o.lr(),
          std::get<0>(o.betas()), std::get<1>(o.betas()), o.weight_decay(), o.eps(), o.amsgrad(),
          /*maximize=*/false);
  };
  if constexpr (kDecoupled<Options>) {
    kernel([](auto&&... arguments) { at::_fused_adamw_(arguments...); });
  } else {
    kernel([](auto&&... arguments) { at::_fused_adam_(arguments...); });
  }
}

// step() of both classes.
template <typename Options, typename State, typename States>
void update(std::vector<torch::optim::OptimizerParamGroup>& groups, States& states) {
  const at::NoGradGuard no_grad;
  const auto parameters = fused_parameters(groups, "fused_adam");
  for (const auto& of_group : parameters) {
    if (of_group.empty()) continue;
    comm::refuse_capture(of_group.front().device(), "[fused_adam] step()",
                         "steps are counted on the host: a replay would correct its averages as if "
                         "it were always the captured one; call it outside of the captured part");
    for (const auto& parameter : of_group) {
      const auto found = states.find(parameter.unsafeGetTensorImpl());
      if (found == states.end()) continue;
      const auto& state = static_cast<const State&>(*found->second);
      check_fused_state(state.exp_avg(), parameter, "fused_adam");
      check_fused_state(state.exp_avg_sq(), parameter, "fused_adam");
      check_fused_state(state.max_exp_avg_sq(), parameter, "fused_adam");
    }
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto& options = static_cast<const Options&>(groups[i].options());
    ByKind<Lists> others;
    for (const auto& parameter : parameters[i]) {
      auto& state = states[parameter.unsafeGetTensorImpl()];
      if (!state) state = std::make_unique<State>();
      const Item item = item_of(parameter, static_cast<State&>(*state), options.amsgrad());
      if (is_plain(item)) {
        update_plain(item, options);
      } else {
        others.of(parameter).add(item);
      }
    }
    for (const auto& [kind, lists] : others) update(lists, options);
    count_versions(parameters[i]);
  }
}

}  // namespace

at::Tensor FusedAdam::step(LossClosure closure) {
  const at::Tensor loss = loss_of(closure);
  update<AdamOptions, AdamParamState>(param_groups_, state_);
  return loss;
}

at::Tensor FusedAdamW::step(LossClosure closure) {
  const at::Tensor loss = loss_of(closure);
  update<AdamWOptions, AdamWParamState>(param_groups_, state_);
  return loss;
}

}  // namespace lockstep::parallel
