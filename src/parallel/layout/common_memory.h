// Parameters of which several ranks have one copy in memory that they share, as an Fsdp or a
// ZeroOptimizer leaves them: without a copy for each rank, for which there may be no room. And
// shards whose values are in whole parameters, too.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace lockstep::parallel {

// The tensor's memory is common to the ranks, and nothing makes them write to it in turns any more.
void note_common(const at::Tensor& tensor);
// The tensor's memory is common to the ranks, and a ZeroOptimizer makes them write to it in turns.
void note_shared(const at::Tensor& tensor);
// Whether it is in memory of either kind.
bool is_common(const at::Tensor& tensor);

// The shard's parameters are whole, by Fsdp::unshard(), and no more.
void note_unsharded(const at::Tensor& shard);
void forget_unsharded(const at::Tensor& shard);
bool is_unsharded(const at::Tensor& shard);

// Gives those of the tensors that are in such memory memory of their own, with the same values.
void take_own_copies(const std::vector<std::pair<std::string, at::Tensor>>& tensors);

}  // namespace lockstep::parallel
