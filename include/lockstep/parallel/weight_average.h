// Averages a model's weights over the steps of its training, for evaluation and for the model that
// is kept: exponential moving averages (EMA), and stochastic weight averaging (SWA; Izmailov et
// al., "Averaging Weights Leads to Wider Optima and Better Generalization", UAI 2018).
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/core/compiler.h"

namespace lockstep::parallel {

// How a WeightAverage averages. The same on all ranks.
struct WeightAverageOptions {
  // average = decay * average + (1 - decay) * weights, from 0 to 1. Nothing: the plain mean of all
  // weights that were averaged, as SWA has it.
  std::optional<double> decay = 0.999;
  // So many calls of update() copy the weights only: the average begins after them.
  int64_t start = 0;
  // Then every so many calls take part in it, the first one among them.
  int64_t every = 1;
  // In place of `decay`, one that changes: of the average that is taken after `before` others, from
  // 1 on, as the first one copies the weights. Diffusion models and detectors let it grow while a
  // training begins:
  //   .decay_of = [](int64_t n) { return std::min(0.9999, 1 - std::pow(1.0 + n, -0.75)); }
  // A function of nothing else, so that a run that is resumed goes on with it.
  std::function<double(int64_t before)> decay_of = nullptr;
};

// Averages of a model's weights:
//
//   WeightAverage average(net->parameters());         // fsdp.parameters() with an Fsdp
//   ... optimizer.step(); average.update();           // after each step
//   {
//     const auto applied = average.apply();           // the model's weights are the average
//     evaluate(net);
//   }                                                 // and are what they were
//
// On each rank it averages what that rank has: whole parameters, equal on all ranks under Ddp and
// with ZeroOptimizer, or an Fsdp's parts of them. It communicates nothing, and each element's
// average depends on nothing but that element, so its bits are those of one process. The average of
// half-precision weights is float32. Tracked by a Checkpointer it is saved under the names of the
// parameters and restored on any number of ranks, with or without Fsdp.
//
// Statistics of BatchNorm belong to the weights with which they were made: give net->buffers(), too
// (PyTorch's use_buffers), or call update_batch_norm() while the average is applied. Of tensors
// that are neither real nor complex, such as counters, the average is what they were at the last
// update().
class WeightAverage {
 public:
  // A tensor that is given several times has one average. Throws ConfigError for a decay outside of
  // 0 to 1, a negative start, an `every` below 1, and for undefined and sparse tensors.
  explicit WeightAverage(const std::vector<at::Tensor>& weights, WeightAverageOptions options = {});
  WeightAverage(const WeightAverage&) = delete;
  WeightAverage& operator=(const WeightAverage&) = delete;

  // After optimizer.step(). Throws ConfigError while the average is applied, for weights that have
  // another size or device than at construction, and for a decay_of() outside of 0 to 1.
  void update();
  // Begins anew, with the weights as they are: after loading others, for instance.
  void restart();
  // How often update() was called, with the runs before that were restored.
  int64_t updates() const { return updates_; }

  // The average of each of the weights given, in their order: to be read.
  const std::vector<at::Tensor>& averages() const { return given_; }

  // A guard: its destructor restores the weights' values from before apply(). What was written to
  // the weights in between is lost.
  class Applied {
   public:
    // Restores the values.
    ~Applied();
    // The one that was moved from restores nothing.
    Applied(Applied&& other) noexcept
        : average_(std::exchange(other.average_, nullptr)), before_(std::move(other.before_)) {}
    Applied& operator=(Applied&&) = delete;

   private:
    friend class WeightAverage;
    explicit Applied(WeightAverage& average);
    WeightAverage* average_;
    std::vector<at::Tensor> before_;
  };
  // The weights have the average's values while the result lives; that takes memory for a copy of
  // the weights. Between two steps: not between a forward and its backward. Weights that are one
  // memory for all ranks (ZeroOptions::share_parameters) are in memory of this rank's own
  // meanwhile, which detach() and views of them from before do not see. With an Fsdp's parts:
  // outside of unshard() and reshard() (ConfigError), which may come while the result lives, to
  // read or save the average. Throws as update().
  [[nodiscard]] Applied apply();
  // Whether an apply() has not ended.
  bool is_applied() const { return is_applied_; }

 private:
  friend class WeightAverageState;  // what a checkpoint saves

  void check(const char* what) const;
  double share_of_next() const;  // of the weights in the next average

  WeightAverageOptions options_;
  std::vector<at::Tensor> weights_, averages_;  // each once
  std::vector<at::Tensor> given_;               // of averages_, those of the weights given
  int64_t updates_ = 0;                         // calls
  int64_t averaged_ = 0;                        // of them, those that are in the average
  bool is_applied_ = false;
};

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::WeightAverage;
using parallel::WeightAverageOptions;
}  // namespace lockstep
