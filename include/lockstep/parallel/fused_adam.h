// Adam and AdamW in one pass over each parameter. State, options, save() and load() are
// torch::optim's.
#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include "lockstep/core/compiler.h"

namespace lockstep::parallel {

// Drop-in for torch::optim::Adam. Bits are those of Python's Adam(fused=True) on one thread and a
// processor with AVX2 (there float32 has a kernel of ours; the rest is torch's), which differ from
// torch::optim::Adam's in the last place. On a GPU the kernels are torch's, one launch for all
// parameters of a dtype. step() throws ConfigError for a sparse gradient and for a
// parameter with overlapping or gapped memory, before it changed anything. Several times faster:
// docs/benchmarks.md.
class FusedAdam : public torch::optim::Adam {
 public:
  using Adam::Adam;
  // See Optimizer::step().
  at::Tensor step(LossClosure closure = nullptr) override;
};

// As FusedAdam, with decoupled weight decay (Loshchilov and Hutter, ICLR 2019), as Python's
// AdamW(fused=True).
class FusedAdamW : public torch::optim::AdamW {
 public:
  using AdamW::AdamW;
  // See Optimizer::step().
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::FusedAdam;
using parallel::FusedAdamW;
}  // namespace lockstep
