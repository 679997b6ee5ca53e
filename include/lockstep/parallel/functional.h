// Collectives that autograd differentiates, for losses over the samples of all ranks (contrastive
// learning) and models whose parts lie on several ranks (mixtures of experts).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::functional {

// torch.distributed.nn.functional's in C++. Each returns a new tensor, on the input's device, and
// leaves the input as it is. The gradient is that of the sum of all ranks' losses: if every rank
// computes the same loss from what all_gather() returned, Ddp's average of the ranks' gradients is
// the gradient of that loss. Second derivatives (create_graph) are those of the same sum.
//
// Ranks: all of `group` call each function equally often and in one order, and again in backward();
// so inputs require gradients on every rank or on none, and every rank's loss depends on the result
// (multiply it by 0 where it does not matter). A rank that does neither gives all of them a
// CommError. Calls in backward() come in the order of the graph: where the graphs of ranks differ
// (experts without tokens), give these calls a group of their own, by Group::split(), or they come
// in another order than those of a Ddp or Fsdp on `group`, which is a CommError.
//
// Tensors are of floating-point or complex numbers where a gradient is needed. Every function
// throws ConfigError with lanes, whose losses may not depend on which lanes a rank has, and for
// groups with Python ranks.

// The ranks' sum (or Average), of the input's shape, which is that of every rank. ConfigError for
// another `op`.
at::Tensor all_reduce(const at::Tensor& input, const Group& group, ReduceOp op = ReduceOp::Sum);

// The ranks' inputs one after another along the first dimension. Ranks may have different numbers
// of rows, also none; throws ConfigError on all ranks when inputs differ in anything else.
// Communicates the numbers of rows first.
at::Tensor all_gather(const at::Tensor& input, const Group& group);

// This rank's of size() equal parts along the first dimension of the ranks' sum (or Average). The
// input has the same shape on every rank. ConfigError for another `op`, and for rows that cannot be
// divided.
at::Tensor reduce_scatter(const at::Tensor& input, const Group& group, ReduceOp op = ReduceOp::Sum);

// What all_to_all() has brought.
struct Exchanged {
  at::Tensor rows;              // rank 0's, then rank 1's, and so on
  std::vector<int64_t> counts;  // how many of each rank
};
// counts[r] rows of `input`, one rank's after another, go to rank r. With the same arguments the
// other way round, all_to_all(answer, result.counts, group), answers return to where their rows
// came from. ConfigError on this rank alone for counts that are not size() many, are negative or
// have another sum than input.size(0). Communicates the counts first.
Exchanged all_to_all(const at::Tensor& input, const std::vector<int64_t>& counts,
                     const Group& group);

}  // namespace lockstep::functional
