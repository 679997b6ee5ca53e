// An average over more addends ("lanes") than there are ranks, in the one order of summation: the
// tree over lane numbers, independent of which rank has computed which lane.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/core/shard.h"

namespace lockstep::comm {

// Rank r of W has lanes Shard{r, W}.of(lanes) and has added them up as far as the tree does: one
// partial sum for each of its nodes. Where every rank has one node, and the rest of the tree has
// the shape of the tree over ranks, this is an all_reduce. Elsewhere (3 ranks with 8 lanes) each
// rank receives its slice of all partial sums, adds them in the tree's order and gives the result
// to all.
class NodeSum {
 public:
  // The same on every rank; size() <= lanes. Communicates nothing.
  NodeSum(const Group& group, int64_t lanes);

  // Of this rank.
  Range lanes() const { return lanes_; }
  const std::vector<Range>& nodes() const { return nodes_[group_.rank()]; }
  bool is_one_call() const { return one_call_; }

  // parts[k], this rank's sum of nodes()[k]: contiguous, real and the same on all ranks. parts[0]
  // becomes the sum of all lanes divided by their number; the other parts are left as they are.
  // What they point to stays untouched until the work is over.
  Work average(const std::vector<at::Tensor>& parts, const CallOptions& options = {}) const;

 private:
  struct Shape;

  Work exchange_slices(const std::vector<at::Tensor>& parts, const CallOptions& options) const;

  Group group_;
  int64_t count_;
  Range lanes_;
  std::vector<std::vector<Range>> nodes_;  // by rank
  bool one_call_;
  std::shared_ptr<const Shape> shape_;  // of the tree above the nodes
};

}  // namespace lockstep::comm
