// Keeps the ranks' buffers alike.
#pragma once

#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/parallel/ddp.h"
#include "parallel/packed.h"

namespace lockstep::parallel {

std::vector<int> all_ranks(const Group& group);

// Broadcast, or (Buffers::Average) floating-point ones averaged and the rest broadcast.
class BufferSync {
 public:
  BufferSync(const Group& group, const std::vector<at::Tensor>& buffers, Buffers mode);

  bool empty() const { return copied_.empty() && averaged_.empty(); }

  // start() on all ranks, then finish(). `present` are the ranks whose buffers count; the first of
  // them is the source of what is broadcast.
  void start(const std::vector<int>& present);
  void finish();

 private:
  struct Flat {
    at::Tensor flat;
    std::vector<at::Tensor> tensors;
    comm::Work work;
  };

  Group group_;
  Packed copied_;
  std::vector<Flat> averaged_;  // by dtype
  int64_t divisor_ = 1;
};

}  // namespace lockstep::parallel
