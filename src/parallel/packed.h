// Many tensors in one message.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::parallel {

// Each region in a flat tensor begins on a cache line, so that vectorised kernels meet aligned
// memory.
inline constexpr int64_t kRegionBytes = 64;

inline int64_t aligned(int64_t bytes) {
  return (bytes + kRegionBytes - 1) / kRegionBytes * kRegionBytes;
}

// Tensors of any dtypes, to be broadcast as one string of bytes through the group's own memory.
class Packed {
 public:
  Packed(const Group& group, std::vector<at::Tensor> tensors);

  bool empty() const { return tensors_.empty(); }

  // Every tensor becomes root's: start() on all ranks, then finish(). The tensors' version counters
  // do not move, so a graph that saved one of them can still run backward.
  void start(int root, std::string_view tag);
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
                   int root, std::string_view tag);

}  // namespace lockstep::parallel
