// Loss scaling for float16, whose small gradients would be zero (Micikevicius et al., ICLR 2018).
// bfloat16 has the range of float32 and needs none.
//
//   scaler.scale(loss).backward();
//   scaler.unscale_(adam);                       // only to clip or look at gradients
//   clip_grad_norm_(net.parameters(), 1.0);
//   scaler.step(adam);                           // skipped when a gradient is not finite
//   scaler.update();
#pragma once

#include <torch/optim/optimizer.h>

#include <map>
#include <memory>

#include "lockstep/comm/group.h"
#include "lockstep/parallel/comm_hook.h"

namespace lockstep::parallel {

// PyTorch's defaults.
struct GradScalerOptions {
  double init_scale = 65536.0;
  double growth_factor = 2.0;   // after growth_interval steps in a row without overflow
  double backoff_factor = 0.5;  // after a step with one
  int64_t growth_interval = 2000;
  bool enabled = true;  // false: scale() and step() pass through, the rest does nothing
};

// For a checkpoint.
struct GradScalerState {
  double scale = 0;
  int64_t growth_tracker = 0;  // steps in a row without overflow
};

// torch.amp.GradScaler, whose ranks take the same steps: an overflow on any rank of the group is
// one on all, also where ranks hold different gradients (shards, averaging less often than every
// step). Scales, steps and skips are those of PyTorch, to the bit. Ranks: all of the group call the
// same methods in the same order; unscale_() (or the step() that implies it) is one all_reduce of
// two float32, none in a group of one. Methods called out of order throw ConfigError and change
// nothing.
class GradScaler {
 public:
  // Throws ConfigError for a scale or interval that is not above 0, a growth factor that is not
  // above 1, or a backoff factor outside (0, 1).
  explicit GradScaler(const Group& group = {}, const GradScalerOptions& options = {});

  // The loss times the scale, in float32 for a narrower loss. Any value that is infinite before it
  // was scaled stays so: compute losses in float32, as Autocast does.
  at::Tensor scale(const at::Tensor& loss);

  // Divides the optimizer's gradients by the scale and notes whether one is not finite. Once per
  // optimizer and step, after its last backward(). float16 gradients are refused: keep float32
  // parameters. So are an Fsdp's shards by a scaler without their group.
  void unscale_(torch::optim::Optimizer& optimizer);

  // optimizer.step(), after unscale_() if that was not called; not when a gradient of any rank is
  // not finite. Returns whether the optimizer stepped. LBFGS is refused: it evaluates the loss
  // several times a step.
  bool step(torch::optim::Optimizer& optimizer);

  // Backs off when any optimizer's step was skipped since the last update(), else counts towards
  // growth. Communication hooks of the Ddps to which the optimizers' parameters are attached are
  // told the new scale (CommHook::rescale).
  void update();

  // The current factor, 1 when disabled. Waits for the device.
  double factor() const;

  // For a checkpoint: what restore() takes back.
  GradScalerState state() const;
  void restore(const GradScalerState& state);

 private:
  enum class Stage { Unscaled, Stepped };
  struct PerOptimizer {
    Stage stage;
    at::Tensor overflow;  // float32, above 0: a gradient was not finite
  };
  void place_on(at::Device device);

  Group group_;
  GradScalerOptions options_;
  GradScalerState initial_;
  // On the device of the first loss: float32 and int32 of one element.
  at::Tensor scale_, growth_tracker_;
  std::map<const torch::optim::Optimizer*, PerOptimizer> optimizers_;
  // The hooks of all optimizers that were unscaled so far.
  std::map<const CommHook*, std::weak_ptr<CommHook>> hooks_;
};

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::GradScaler;
using parallel::GradScalerOptions;
using parallel::GradScalerState;
}  // namespace lockstep
