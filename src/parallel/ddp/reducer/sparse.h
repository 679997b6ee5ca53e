// Averages sparse gradients: what differs from rank to rank is sent, the rest of the table is not.
#pragma once

#include <string_view>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/core/shard.h"
#include "parallel/ddp/model.h"

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

  // The same over lanes: mine[i][l] is what this rank's l-th lane of Shard{rank, size()}.of(lanes)
  // has for parameter i, undefined where it has nothing. Lanes go to all ranks one by one: what a
  // rank adds to nothing may be another zero than what it does not add.
  void average_lanes(const std::vector<std::vector<at::Tensor>>& mine,
                     const std::vector<char>& reached, int64_t lanes) const;

 private:
  // How many addends there are, which are this rank's, and the unit of one, such as "rank".
  struct Addends {
    std::vector<Range> of_ranks;
    std::string_view unit;
    int64_t count() const { return of_ranks.back().end; }
  };
  using Mine = std::vector<std::vector<at::Tensor>>;

  void average(Mine mine, const std::vector<char>& reached, const Addends& addends,
               int64_t divisor) const;
  void refuse_unfit(const at::Tensor& all, std::string_view unit) const;
  at::Tensor sum(const Named& parameter, const std::vector<at::Tensor>& mine,
                 const Addends& addends, const std::vector<int64_t>& counts,
                 int64_t sparse_dim) const;

  Group group_;
  std::vector<Named> parameters_;
};

}  // namespace lockstep::parallel
