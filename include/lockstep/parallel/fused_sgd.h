// SGD in one pass over each parameter. State, options, save() and load() are torch::optim's.
#pragma once

#include <torch/optim/sgd.h>

#include "lockstep/core/compiler.h"

namespace lockstep::parallel {

// Drop-in for torch::optim::SGD, with momentum, Nesterov's too, dampening and weight decay. Bits
// are those of Python's SGD(fused=True); torch::optim::SGD's agree within roundings. On a GPU, too.
// step() throws ConfigError for a sparse gradient and for a parameter with overlapping or gapped
// memory, before it changed anything.
class FusedSGD : public torch::optim::SGD {
 public:
  using SGD::SGD;
  // See Optimizer::step().
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::FusedSGD;
}  // namespace lockstep
