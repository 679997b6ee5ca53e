// The order of summation when parts of the tree were summed up before, by each host for its ranks
// for instance. No torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/reduce/reduce.h"
#include "lockstep/core/shard.h"

namespace lockstep::comm {

// Where the right child of a node of two leaves or more begins: n leaves are split at the largest
// power of two below n.
int64_t middle(Range node);

// The fewest nodes of the tree over ranks [0, size) that cover just `ranks`, which are in order. A
// node is the range of ranks below it.
std::vector<Range> maximal_nodes(const std::vector<int>& ranks, int size);

// The rest of the tree above nodes that cover all ranks.
class Tree {
 public:
  // `nodes` in order, without gap or overlap, each a node of the tree over [0, size).
  Tree(std::vector<Range> nodes, int size);

  // targets[t][i] = the root over parts[k][i], the sum of nodes[k], for every i < count. A target
  // may be one of the parts.
  void sum(const Reduction& reduction, const void* const* parts, std::vector<void*> targets,
           int64_t count) const;

 private:
  struct Step {
    size_t left;
    size_t right;
  };
  size_t build(Range node);

  std::vector<Range> nodes_;
  // In order; step k makes part nodes_.size() + k. None when the nodes are the leaves of a tree of
  // the same shape.
  std::vector<Step> steps_;
};

}  // namespace lockstep::comm
