// Many tensors in one message.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::parallel {

// The elements that have memory of their own: of those that an expanded tensor (stride 0) repeats,
// the first. A view of `tensor`.
at::Tensor own_elements(const at::Tensor& tensor);
// Whether two of those lie in the same place, as in a sliding window made by as_strided(): such a
// tensor cannot be written to.
bool has_overlaps(const at::Tensor& tensor);

// Tensors of any dtypes, to be broadcast as one string of bytes through the group's own memory.
class Packed {
 public:
  Packed(const Group& group, std::vector<at::Tensor> tensors);

  bool empty() const { return tensors_.empty(); }
  // Another tensor like it takes its place.
  void replace(size_t index, const at::Tensor& tensor) { tensors_[index] = tensor; }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  // What a tensor became in the last broadcast, with the sizes of its own_elements().
  const at::Tensor& region(size_t index) const { return regions_[index]; }

  // Every region becomes root's tensor: start() on all ranks, then wait() or finish().
  void start(int root, std::string_view label);
  void wait() { work_.wait(); }
  // Tensors too. Their version counters move on all ranks, so that a graph that saved one of them
  // cannot run backward any more, on no rank.
  void finish();

 private:
  Group group_;
  std::vector<at::Tensor> tensors_;
  at::Tensor flat_;
  std::vector<at::Tensor> regions_;
  comm::Work work_;
  bool receives_ = false;
};

// The same for tensors of any total size, in messages of about `chunk_bytes`.
void broadcast_all(const Group& group, const std::vector<at::Tensor>& tensors, int64_t chunk_bytes,
                   int root, std::string_view label);

}  // namespace lockstep::parallel
