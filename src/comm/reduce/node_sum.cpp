#include "comm/reduce/node_sum.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "comm/reduce/reduction.h"
#include "comm/reduce/slice.h"
#include "comm/reduce/tree.h"

namespace lockstep::comm {
namespace {

std::vector<int> numbers_of(Range range) {
  std::vector<int> numbers(static_cast<size_t>(range.size()));
  std::iota(numbers.begin(), numbers.end(), static_cast<int>(range.begin));
  return numbers;
}

Range lanes_of(int rank, int ranks, int64_t lanes) { return Shard{rank, ranks}.of(lanes); }

// Whether ranks [first, last) are the leaves of a tree of this shape whose nodes are the ranks'
// partial sums.
bool has_shape_of_ranks(const std::vector<std::vector<Range>>& nodes, Range ranks) {
  if (std::ranges::any_of(nodes, [](const auto& own) { return own.size() != 1; })) return false;
  if (ranks.size() == 1) return true;
  const int64_t half = middle(ranks);
  const Range all{nodes[ranks.begin][0].begin, nodes[ranks.end - 1][0].end};
  return middle(all) == nodes[half][0].begin && has_shape_of_ranks(nodes, {ranks.begin, half}) &&
         has_shape_of_ranks(nodes, {half, ranks.end});
}

// Copies of the texts that CallOptions refer to: the caller's may be gone when the second call
// starts.
struct Texts {
  explicit Texts(const CallOptions& options)
      : label(options.label),
        name(options.context.name),
        advice(options.advice),
        timeout(options.timeout),
        number(options.context.number),
        pass(options.context.pass) {}

  CallOptions options() const {
    return {.timeout = timeout,
            .label = label,
            .context = {.name = name, .number = number, .pass = pass},
            .advice = advice};
  }

  std::string label, name, advice;
  std::optional<std::chrono::milliseconds> timeout;
  uint32_t number, pass;
};

}  // namespace

struct NodeSum::Shape {
  std::vector<Range> nodes;
  Tree tree;
  int lanes;

  // On a device, where the tree's kernels are libtorch's.
  at::Tensor sum(const at::Tensor& parts, Range node) const {
    const auto found = std::ranges::find(nodes, node);
    if (found != nodes.end()) return parts[found - nodes.begin()];
    return sum(parts, {node.begin, middle(node)}) + sum(parts, {middle(node), node.end});
  }

  // Of the rows of `parts`, one for each node in order.
  at::Tensor average(const at::Tensor& parts) const {
    const at::NoGradGuard no_grad;
    if (!parts.is_cpu()) return sum(parts, {0, lanes}).div(lanes);
    at::Tensor target = at::empty({parts.size(1)}, parts.options());
    std::vector<const void*> rows;
    for (int64_t k = 0; k < parts.size(0); ++k) rows.push_back(data_of(parts[k]));
    const Request average{.outputs = {target}, .op = ReduceOp::Average, .divide_by = lanes};
    const Reduction reduction = reduction_of(average, lanes);
    tree.sum(reduction, rows.data(), {data_of(target)},
             static_cast<int64_t>(target.nbytes()) / size_of(reduction.element));
    return target;
  }
};

NodeSum::NodeSum(const Group& group, int64_t lanes)
    : group_(group), count_(lanes), lanes_(lanes_of(group.rank(), group.size(), lanes)) {
  const int ranks = group.size();
  std::vector<Range> all;
  for (int rank = 0; rank < ranks; ++rank) {
    nodes_.push_back(
        maximal_nodes(numbers_of(lanes_of(rank, ranks, lanes)), static_cast<int>(lanes)));
    all.insert(all.end(), nodes_.back().begin(), nodes_.back().end());
  }
  one_call_ = group.deterministic() && has_shape_of_ranks(nodes_, {0, ranks});
  shape_ = std::make_shared<Shape>(
      Shape{all, Tree(all, static_cast<int>(lanes)), static_cast<int>(lanes)});
}

Work NodeSum::average(const std::vector<at::Tensor>& parts, const CallOptions& options) const {
  const at::Tensor& result = parts.front();
  if (!one_call_) return exchange_slices(parts, options);
  CallOptions call = options;
  if (result.is_cpu()) {
    call.divide_by = static_cast<int>(count_);
    return group_.all_reduce(result, ReduceOp::Average, call);
  }
  return then(group_.all_reduce(result, ReduceOp::Sum, call), [result, count = count_] {
    const at::NoGradGuard no_grad;
    result.div_(count);
    return Work();
  });
}

Work NodeSum::exchange_slices(const std::vector<at::Tensor>& parts,
                              const CallOptions& options) const {
  const at::NoGradGuard no_grad;
  const int ranks = group_.size(), rank = group_.rank();
  const at::Tensor result = parts.front().detach().view({-1});
  std::vector<at::Tensor> slices, sent, received;
  for (int r = 0; r < ranks; ++r) {
    const Range slice = slice_of(r, ranks, result.numel(), result.element_size());
    slices.push_back(result.narrow(0, slice.begin, slice.size()));
    std::vector<at::Tensor> own;
    for (const at::Tensor& part : parts) {
      own.push_back(part.detach().view({-1}).narrow(0, slice.begin, slice.size()));
    }
    sent.push_back(at::stack(own));
  }
  const int64_t mine = slices[rank].numel();
  int64_t nodes = 0;
  for (const auto& theirs : nodes_) nodes += static_cast<int64_t>(theirs.size());
  const at::Tensor all = at::empty({nodes, mine}, result.options());
  int64_t row = 0;
  for (const auto& theirs : nodes_) {
    received.push_back(all.narrow(0, row, static_cast<int64_t>(theirs.size())));
    row += static_cast<int64_t>(theirs.size());
  }
  return then(group_.all_to_all(received, sent, options),
              [shape = shape_, group = group_, texts = Texts(options), all, slices] {
                return group.all_gather(slices, shape->average(all), texts.options());
              });
}

}  // namespace lockstep::comm
