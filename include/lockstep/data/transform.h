// What happens to samples and batches on their way from the data set to the loop.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <concepts>
#include <functional>
#include <type_traits>
#include <utility>

#include "lockstep/data/dataset.h"

namespace lockstep::data {

class Draws;

// One of a batch: without its dimension 0. `target` is undefined when the data set has none.
struct Sample {
  at::Tensor data;
  at::Tensor target;
};

// A function of a sample or of a batch:
//   [](Sample s) { return Sample{s.data + 0.1 * torch::randn_like(s.data), s.target}; }
//   // with <random>
//   [](Sample s, at::Generator g) { std::mt19937 own(g.current_seed()); ... }
//   [](Batch b) { return Batch{b.data / 255, b.target}; }
//
// Results for samples are stacked, so all of a batch need one shape and dtype. A batch comes back
// with as many samples as it had.
//
// What a transform draws from libtorch's default generators is a function of LoaderOptions::seed,
// the epoch, the sample and the transform's place in the list; for a function of a batch, of the
// batch's first sample. So how a sample is treated does not depend on the number of ranks, the
// batch size, the threads or the step the run was resumed at; nor does it for a batch, while it has
// the same samples. The generators themselves stay as they are: what the training draws does not
// depend on transforms. Not covered: rand(), a random engine that lives longer than the call, a
// seed set in the transform.
class Transform {
 public:
  template <typename Function>
  requires(!std::same_as<std::remove_cvref_t<Function>, Transform> &&
           (std::is_invocable_r_v<Batch, Function&, Batch> ||
            std::is_invocable_r_v<Sample, Function&, Sample> ||
            std::is_invocable_r_v<Sample, Function&, Sample, at::Generator>))
      Transform(Function function) {  // NOLINT(google-explicit-constructor): a list of lambdas
    if constexpr (std::is_invocable_r_v<Batch, Function&, Batch>) {
      batch_ = std::move(function);
    } else if constexpr (std::is_invocable_r_v<Sample, Function&, Sample>) {
      sample_ = std::move(function);
    } else {
      drawing_ = std::move(function);
    }
  }

  // Whether it was made from an empty std::function.
  bool empty() const { return !batch_ && !sample_ && !drawing_; }

 private:
  friend class BatchMaker;
  // The batch of these samples, transformed, where this transform's draws take place.
  Batch apply(Batch batch, at::IntArrayRef indices, Draws& draws) const;
  Batch apply_to_samples(Batch batch, at::IntArrayRef indices, Draws& draws) const;

  std::function<Batch(Batch)> batch_;
  std::function<Sample(Sample)> sample_;
  std::function<Sample(Sample, at::Generator)> drawing_;
};

}  // namespace lockstep::data

namespace lockstep {
using data::Batch;
using data::Sample;
}  // namespace lockstep
