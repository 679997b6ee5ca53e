// Features of mean 0 and standard deviation 1.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/transform.h"

namespace lockstep::data {

// What becomes of a column whose values are all the same, which has no deviation.
enum class ConstantColumn {
  Error,  // DataError that names it
  Zero,   // it becomes 0, as in scikit-learn
};

// How a StandardScaler measures.
struct ScalerOptions {
  ConstantColumn constant = ConstantColumn::Error;
  // The columns' names in errors; their numbers when empty.
  std::vector<std::string> names = {};
};

// (x - mean) / deviation by column, where the deviation divides by the number of rows, as
// scikit-learn's StandardScaler has it. Measured on the training data, and applied to those of the
// evaluation too. Sums are taken without rounding (lockstep/core/exact_sum.h): the same bits for
// every number of ranks and every division of the rows among them.
//
// A handle: copies, and the transforms that it has made, are the same scaler. Give it to
// Checkpointer::track() and a run that resumes has the numbers that it began with.
class StandardScaler {
 public:
  StandardScaler();

  // Measures the data of all samples; each rank reads its share. Every rank calls it, with the same
  // data set. Throws DataError on all ranks for a NaN or an infinity (it names column and sample),
  // for samples that a rank cannot read, for a deviation beyond float64, and for a column that is
  // constant where that is not allowed; the scaler is then as it was.
  void fit(const Dataset& dataset, const comm::Group& group = {},
           const ScalerOptions& options = {});
  // As fit(), for the targets, for example of a regression.
  void fit_targets(const Dataset& dataset, const comm::Group& group = {},
                   const ScalerOptions& options = {});
  // As fit(), for ranks that have different rows each, n x columns; n may be 0.
  void fit_rows(const at::Tensor& rows, const comm::Group& group = {},
                const ScalerOptions& options = {});

  // Samples scaled, and back: n x columns, or n x ... of as many elements; of the same dtype,
  // whole numbers as float32, computed in float64. Throws ConfigError for another number of
  // columns, and before fit().
  at::Tensor apply(const at::Tensor& samples) const;
  at::Tensor invert(const at::Tensor& scaled) const;

  // apply() to a batch's data, or its targets, for LoaderOptions::transforms.
  Transform transform() const;
  Transform transform_targets() const;

  // Whether it was measured or restored.
  bool is_fitted() const;
  // Float64, one per column; undefined before fit(). A constant column has deviation 1.
  const at::Tensor& mean() const;
  const at::Tensor& deviation() const;
  // Takes what was saved. Throws ConfigError unless both have one dimension of the same size.
  void restore(const at::Tensor& mean, const at::Tensor& deviation);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace lockstep::data

namespace lockstep {
using data::StandardScaler;
}  // namespace lockstep
