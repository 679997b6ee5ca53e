// Sums over ranks on several NUMA nodes of a host, in steps: each node's ranks first, so that less
// data moves between nodes. The order of summation stays that of the tree (tree.h). No torch.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/reduce/tree.h"

namespace lockstep::comm {

class NumaNodes {
 public:
  // For less data the meetings between the steps would take longer than the data.
  static constexpr int64_t kLeastBytes = 256 << 10;

  // numbers[r]: the node that rank r is on, negative where that is not known.
  NumaNodes(const std::vector<int>& numbers, int rank);

  // Whether the steps move at most a third of what moves between nodes without them. The same on
  // all ranks; never where some rank's node is not known.
  bool help_all_reduce() const { return help_all_reduce_; }
  bool help_reduce_scatter() const { return help_reduce_scatter_; }

  // all_reduce of the elements at parts[r] of each rank r, in three steps, between which all ranks
  // meet. Each node's ranks share out the elements and add up the node's parts, as far as the tree
  // goes; a sum lies in the part of its first rank.
  void sum_within(const Reduction& reduction, const std::vector<char*>& parts, int64_t count) const;
  // Each rank completes a slice of the elements, in all parts of its node.
  void sum_between(const Reduction& reduction, const std::vector<char*>& parts,
                   int64_t count) const;
  // Each node's ranks share out what other nodes have completed, and copy it into their parts.
  void copy_from_others(const Reduction& reduction, const std::vector<char*>& parts,
                        int64_t count) const;

  // reduce_scatter: the sums over its node's ranks that `rank` makes for ranks of other nodes.
  struct Given {
    int to;
    Range ranks;
  };
  std::vector<Given> given_by(int rank) const;
  int64_t most_given() const { return most_given_; }  // by any rank
  // What makes up this rank's result: what each rank of its node has, and sums of other nodes.
  struct Taken {
    Range ranks;
    int from;
    int index;  // in given_by(from); -1: the rank's own data
  };
  const std::vector<Taken>& taken() const { return taken_; }
  const Tree& tree_of_taken() const { return tree_of_taken_; }

 private:
  struct Node {
    std::vector<int> ranks;
    std::vector<Range> sums;  // the fewest nodes of the tree that cover the ranks
  };
  const Node& node_of(int rank) const { return nodes_[places_[rank].node]; }
  int giver(const Node& node, int to) const;

  int rank_, size_;
  struct Place {
    size_t node;
    int index;  // among the node's ranks
  };
  std::vector<Place> places_;  // by rank
  std::vector<Node> nodes_;
  std::vector<Range> sums_;  // of all nodes, in order
  Tree tree_;
  bool help_all_reduce_, help_reduce_scatter_;
  int64_t most_given_ = 0;
  std::vector<Taken> taken_;
  Tree tree_of_taken_;
};

}  // namespace lockstep::comm
