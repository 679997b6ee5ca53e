// What a plan needs to know of any module, by running it.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "lockstep/plan/model_profile.h"

namespace lockstep::plan {

// A forward and a backward on the CPU. Memory is what libtorch's allocator gave out, in bytes, and
// beside what was there before; gradients have their memory already, as in a step after the first.
struct MeasuredPass {
  double kept = 0;     // alive when forward has ended
  double peak = 0;     // the most at a moment of forward and backward
  double flops = 0;    // of forward: matrix products, convolutions, attention
  double seconds = 0;  // of forward and backward together, the median
};

// `loss` runs forward and returns the loss, a scalar; it is called once for memory, and `timed`
// times for the time. Gradients of the module are undefined when it ends. Ranks: any; it does not
// communicate, so it is not for a module with a Ddp or Fsdp attached.
MeasuredPass measure_pass(torch::nn::Module& module, const std::function<at::Tensor()>& loss,
                          int timed = 3);

// How a module is measured.
struct MeasureOptions {
  int64_t batch = 2;  // samples of the smaller run; the other has twice as many
  // Modules that Fsdp would have as units (units_of()), none within another, each called through
  // lockstep::call(). Without any, the module is one unit, and nothing of it is recomputed.
  std::vector<std::shared_ptr<torch::nn::Module>> units = {};
  int64_t tokens = 0;       // of a sample, for tokens/s
  double sample_bytes = 0;  // of the batch that the loader makes
};

// The profile of a module: parameters, arithmetic and memory of each unit, from two runs of
// different batches, so that what grows with the batch can be told from what does not.
// `loss(batch)` returns the loss of this many samples. Throws ConfigError for a batch below 1, and
// for a unit that is not one of the module's, is within another or is not called.
//
//   const auto profile = plan::measure(*net, [&](int64_t n) { return loss_of(net, draw(n)); });
//   const auto plan = plan::make_plan(profile, {.batch = 32}, machine, {.ranks = 8});
ModelProfile measure(torch::nn::Module& module, const std::function<at::Tensor(int64_t)>& loss,
                     const MeasureOptions& options = {});

}  // namespace lockstep::plan
