// Reductions by direct exchange: each member receives its slice from all others, adds in tree order
// and sends the sum to the members that want it. The same bytes as a ring, in two steps instead of
// 2 (n - 1), and the one order of summation. (The direct-exchange algorithm of Rabenseifner, 2004.)
// No torch.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/direct/link.h"
#include "comm/reduce/reduce.h"
#include "comm/reduce/tree.h"

namespace lockstep::comm {

// The inputs and outputs of one member in a reduction. "Slice s" is what member s sums up.
struct DirectCall {
  Reduction reduction;
  // parts[j][s]: slice s of this member's j-th node.
  std::vector<std::vector<const char*>> parts;
  // Of each slice.
  std::vector<int64_t> bytes;
  // Where the sum of this member's slice goes. May be parts[0][rank].
  char* sum = nullptr;
  // results[s]: where the sum of slice s goes here; nullptr (or an empty list): not wanted here.
  std::vector<char*> results = {};
  // Members that get this one's sum.
  std::vector<int> takers = {};
  // Of 31 bits: of the slices sent to the members that sum them up, and of the sums.
  uint32_t slice_tag = 0;
  uint32_t sum_tag = 0;
};

class Direct {
 public:
  // nodes[m]: the nodes of the tree over [0, ranks) whose sums member m contributes. All members'
  // nodes cover the tree.
  Direct(const std::vector<std::vector<Range>>& nodes, int ranks);
  // Every member contributes its own rank.
  static Direct of_ranks(int ranks);

  // Blocks until this member's part is done and its memory may be used again. Throws what the link
  // throws.
  void run(Link& link, const DirectCall& call) const;

  // In which slices of `bytes` move.
  static int64_t chunk_bytes(const std::vector<int64_t>& bytes);
  // The member that contributes node k of the tree.
  const std::vector<int>& owners() const { return owners_; }
  const Tree& tree() const { return tree_; }

 private:
  class Incoming;
  Direct(std::vector<std::pair<Range, int>> owned, int ranks);

  std::vector<int> owners_;
  Tree tree_;
};

}  // namespace lockstep::comm
