#include "comm/shm/numa_nodes.h"

#include <algorithm>

#include "comm/reduce/slice.h"

namespace lockstep::comm {
namespace {

constexpr int64_t kWorthIt = 3;  // times less between nodes: steps move more within them

bool by_begin(const Range& a, const Range& b) { return a.begin < b.begin; }

std::vector<void*> moved(const std::vector<char*>& parts, const std::vector<int>& ranks,
                         int64_t bytes) {
  std::vector<void*> all;
  for (const int r : ranks) all.push_back(parts[r] + bytes);
  return all;
}

}  // namespace

NumaNodes::NumaNodes(const std::vector<int>& numbers, int rank)
    : rank_(rank),
      size_(static_cast<int>(numbers.size())),
      tree_({{0, size_}}, size_),
      tree_of_taken_({{0, size_}}, size_) {
  const bool known = std::ranges::none_of(numbers, [](int number) { return number < 0; });
  std::vector<int> seen;
  for (int r = 0; r < size_; ++r) {
    const int number = known ? numbers[r] : 0;
    const size_t node = std::ranges::find(seen, number) - seen.begin();
    if (node == seen.size()) {
      seen.push_back(number);
      nodes_.emplace_back();
    }
    places_.push_back({node, static_cast<int>(nodes_[node].ranks.size())});
    nodes_[node].ranks.push_back(r);
  }
  for (Node& node : nodes_) {
    node.sums = maximal_nodes(node.ranks, size_);
    sums_.insert(sums_.end(), node.sums.begin(), node.sums.end());
  }
  std::ranges::sort(sums_, by_begin);

  // In slices of one rank: what all ranks read from other nodes. Without steps an all_reduce writes
  // as much to them.
  int64_t plain = 0, sums = 0, copies = 0;
  for (const Node& node : nodes_) {
    const auto own = std::ssize(node.ranks);
    plain += own * (size_ - own);
    sums += own * (std::ssize(sums_) - std::ssize(node.sums));
    copies += size_ - own;
  }
  help_all_reduce_ = plain > 0 && kWorthIt * (sums + copies) <= 2 * plain;
  help_reduce_scatter_ = plain > 0 && kWorthIt * sums <= plain;

  if (plain == 0) return;
  tree_ = Tree(sums_, size_);
  for (const int r : node_of(rank).ranks) taken_.push_back({{r, r + 1}, r, -1});
  for (int r = 0; r < size_; ++r) {
    const std::vector<Given> given = given_by(r);
    most_given_ = std::max(most_given_, std::ssize(given));
    for (size_t i = 0; i < given.size(); ++i) {
      if (given[i].to == rank) taken_.push_back({given[i].ranks, r, static_cast<int>(i)});
    }
  }
  std::ranges::sort(taken_, by_begin, &Taken::ranks);
  std::vector<Range> leaves;
  for (const Taken& one : taken_) leaves.push_back(one.ranks);
  tree_of_taken_ = Tree(leaves, size_);
}

void NumaNodes::sum_within(const Reduction& reduction, const std::vector<char*>& parts,
                           int64_t count) const {
  const Node& own = node_of(rank_);
  const int64_t element = size_of(reduction.element);
  const Range slice =
      slice_of(places_[rank_].index, static_cast<int>(own.ranks.size()), count, element);
  for (const Range& sum : own.sums) {
    std::vector<const void*> sources;
    for (int64_t r = sum.begin; r < sum.end; ++r)
      sources.push_back(parts[r] + slice.begin * element);
    void* target = parts[sum.begin] + slice.begin * element;
    reduce({reduction.element, reduction.combine}, sources.data(), static_cast<int>(sum.size()),
           &target, 1, slice.size());
  }
}

void NumaNodes::sum_between(const Reduction& reduction, const std::vector<char*>& parts,
                            int64_t count) const {
  const int64_t element = size_of(reduction.element);
  const Range slice = slice_of(rank_, size_, count, element);
  std::vector<const void*> sources;
  for (const Range& sum : sums_) sources.push_back(parts[sum.begin] + slice.begin * element);
  tree_.sum(reduction, sources.data(), moved(parts, node_of(rank_).ranks, slice.begin * element),
            slice.size());
}

void NumaNodes::copy_from_others(const Reduction& reduction, const std::vector<char*>& parts,
                                 int64_t count) const {
  const Place& own = places_[rank_];
  const std::vector<int>& ranks = nodes_[own.node].ranks;
  const int64_t element = size_of(reduction.element);
  for (int r = 0; r < size_; ++r) {
    if (places_[r].node == own.node) continue;
    const Range slice = slice_of(r, size_, count, element);
    const Range share = slice_of(own.index, static_cast<int>(ranks.size()), slice.size(), element);
    const int64_t begin = (slice.begin + share.begin) * element;
    const void* source = parts[r] + begin;
    reduce({reduction.element, reduction.combine}, &source, 1, moved(parts, ranks, begin).data(),
           static_cast<int>(ranks.size()), share.size());
  }
}

// Which of the node's ranks makes its sums for `to`, so that all have as many to make where nodes
// are equal.
int NumaNodes::giver(const Node& node, int to) const {
  return node.ranks[static_cast<size_t>(places_[to].index) % node.ranks.size()];
}

std::vector<NumaNodes::Given> NumaNodes::given_by(int rank) const {
  std::vector<Given> given;
  const Node& own = node_of(rank);
  for (int to = 0; to < size_; ++to) {
    if (places_[to].node == places_[rank].node || giver(own, to) != rank) continue;
    for (const Range& sum : own.sums) given.push_back({to, sum});
  }
  return given;
}

}  // namespace lockstep::comm
