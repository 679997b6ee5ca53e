// Each collective as rounds of kernels that meet in each other's memory. Sums are taken in the one
// tree over the ranks, so they have the bits of every other transport of ours.
#pragma once

#include <memory>
#include <vector>

#include "comm/cuda_ipc/communicator.h"
#include "comm/cuda_ipc/sharing.h"
#include "comm/device/ops.h"
#include "comm/reduce/reduce.h"

namespace lockstep::comm {

class CudaIpcOps : public DeviceOps {
 public:
  // No kernel has more than `most_blocks`, the same on all ranks.
  CudaIpcOps(std::shared_ptr<cuda_ipc::Communicator> comm, cuda_ipc::Sharing sharing,
             int most_blocks);

  bool deterministic() const override { return true; }
  void check(const Request&) const override {}
  std::optional<std::string> refuses_graphs() const override;
  void run(const DeviceCall& call, const c10::Stream& stream) override;
  void run_messages(const Calls& calls, const c10::Stream& stream) override;
  at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) override;

 private:
  // Some bytes of this rank's, of which a stage holds as much as a round has room for in one slot.
  struct Part {
    char* data = nullptr;
    int64_t bytes = 0;
    int slot = 0;
    int from = 0;  // of what comes out: from whose stage
  };
  // This rank's part of a tensor that may be in memory which all ranks map.
  struct DirectPart {
    char* whole = nullptr;  // the tensor; null: the call needs stages
    char* data = nullptr;
    int64_t bytes = 0;
    char* own = nullptr;  // in memory of its own: cuda_ipc::Direct
    bool reads = false, writes = false;
  };
  struct Plan {
    int slots = 1;
    int64_t largest = 0;  // of all parts on all ranks
    std::vector<Part> in, out;
    Reduction reduction;
    std::vector<Part> combined;  // at most one
    bool is_in_two = false;      // the combined part goes into the stage, from where it comes out
    DirectPart direct;
  };

  Plan plan_of(const Request& request, int64_t largest) const;
  void plan_reduction(Plan& plan, const Request& request) const;
  std::vector<Part> parts_of(const std::vector<at::Tensor>& tensors) const;
  // Of a round for one slot, in bytes.
  int64_t room_of(const Plan& plan) const;
  cuda_ipc::Round round_of(const Plan& plan, const DeviceCall& call) const;
  void find_direct(cuda_ipc::Round& round, const DirectPart& part) const;
  void run_steps(cuda_ipc::Round& round, unsigned blocks, cuda_ipc::Function middle,
                 cuda_ipc::Stream stream);
  cuda_ipc::Message message_of(const DeviceCall& call) const;

  const std::shared_ptr<cuda_ipc::Communicator> comm_;
  const cuda_ipc::Sharing sharing_;
  const int rank_, size_, most_blocks_;
  // Where streams wait, the same on all ranks: how often they have, and which stage is next.
  uint32_t meetings_ = 0, rounds_ = 0;
};

}  // namespace lockstep::comm
