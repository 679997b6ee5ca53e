#include "comm/reduce/tree.h"

#include <algorithm>

namespace lockstep::comm {
namespace {

// Small enough that the partial sums of a step are in the cache for the next.
constexpr int64_t kBlockBytes = 16 << 10;

void cover(const std::vector<int>& ranks, Range node, std::vector<Range>& nodes) {
  const auto first = std::lower_bound(ranks.begin(), ranks.end(), node.begin);
  const auto last = std::lower_bound(ranks.begin(), ranks.end(), node.end);
  if (last - first == node.size()) {
    nodes.push_back(node);
  } else if (last != first) {
    cover(ranks, {node.begin, middle(node)}, nodes);
    cover(ranks, {middle(node), node.end}, nodes);
  }
}

}  // namespace

int64_t middle(Range node) {
  int64_t left = 1;
  while (2 * left < node.size()) left *= 2;
  return node.begin + left;
}

std::vector<Range> maximal_nodes(const std::vector<int>& ranks, int size) {
  std::vector<Range> nodes;
  cover(ranks, {0, size}, nodes);
  return nodes;
}

Tree::Tree(std::vector<Range> nodes, int size) : nodes_(std::move(nodes)) {
  build({0, size});
  // The tree over as many leaves as there are nodes, in the same form.
  const std::vector<Step> steps = std::move(steps_);
  std::vector<Range> leaves;
  const auto count = static_cast<int64_t>(nodes_.size());
  for (int64_t k = 0; k < count; ++k) leaves.push_back({k, k + 1});
  std::swap(leaves, nodes_);
  steps_.clear();
  build({0, count});
  std::swap(leaves, nodes_);
  const bool same = std::equal(
      steps.begin(), steps.end(), steps_.begin(), steps_.end(),
      [](const Step& a, const Step& b) { return a.left == b.left && a.right == b.right; });
  steps_ = same ? std::vector<Step>() : steps;
}

size_t Tree::build(Range node) {
  const auto found = std::find(nodes_.begin(), nodes_.end(), node);
  if (found != nodes_.end()) return found - nodes_.begin();
  const size_t left = build({node.begin, middle(node)});
  const size_t right = build({middle(node), node.end});
  steps_.push_back({left, right});
  return nodes_.size() + steps_.size() - 1;
}

void Tree::sum(const Reduction& reduction, const void* const* parts, std::vector<void*> targets,
               int64_t count) const {
  if (steps_.empty()) {
    return reduce(reduction, parts, static_cast<int>(nodes_.size()), targets.data(),
                  static_cast<int>(targets.size()), count);
  }
  const int64_t element = size_of(reduction.element);
  const int64_t block = kBlockBytes / element;
  std::vector<char> scratch(steps_.size() * kBlockBytes);
  for (int64_t at = 0; at < count; at += block) {
    const int64_t n = std::min(block, count - at);
    std::vector<const void*> all;
    for (size_t k = 0; k < nodes_.size(); ++k) {
      all.push_back(static_cast<const char*>(parts[k]) + at * element);
    }
    for (size_t k = 0; k < steps_.size(); ++k) {
      const void* sources[] = {all[steps_[k].left], all[steps_[k].right]};
      void* into = scratch.data() + k * kBlockBytes;
      if (k + 1 == steps_.size()) {
        reduce(reduction, sources, 2, targets.data(), static_cast<int>(targets.size()), n);
      } else {
        reduce({reduction.element, reduction.combine}, sources, 2, &into, 1, n);
      }
      all.push_back(into);
    }
    for (void*& target : targets) target = static_cast<char*>(target) + n * element;
  }
}

}  // namespace lockstep::comm
