// Averages sparse gradients: what differs from rank to rank is sent, the rest of the table is not.
#pragma once

#include <vector>

#include "lockstep/comm/group.h"
#include "parallel/model.h"

namespace lockstep::parallel {

// Gradients of at::Embedding(sparse = true) and the like. Indices and values of all ranks go to
// all, and each adds them in the fixed tree order, so that the average has the bits of a dense one.
class SparseGradients {
 public:
  SparseGradients(const Group& group, std::vector<Named> parameters)
      : group_(group), parameters_(std::move(parameters)) {}

  bool empty() const { return parameters_.empty(); }

  // Gradients of those that some rank reached become the sum over ranks divided by `divisor`; an
  // undefined one counts as zero. One that no rank reached is not touched. Every rank calls it.
  // Throws ConfigError on all ranks for a gradient that is dense or does not fit on any.
  void average(const std::vector<char>& reached, int64_t divisor) const;

 private:
  void refuse_unfit(const at::Tensor& all) const;
  at::Tensor sum(const Named& parameter, const at::Tensor& mine, const std::vector<int64_t>& counts,
                 int64_t sparse_dim) const;

  Group group_;
  std::vector<Named> parameters_;
};

}  // namespace lockstep::parallel
