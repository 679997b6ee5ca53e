// Each collective as calls of NCCL on one stream, with the meaning that it has on every transport.
#pragma once

#include <c10/core/Stream.h>

#include "comm/device/ops.h"
#include "comm/nccl/communicator.h"

namespace lockstep::comm {

class NcclOps : public DeviceOps {
 public:
  explicit NcclOps(std::shared_ptr<NcclComm> comm)
      : comm_(std::move(comm)), rank_(comm_->rank()), size_(comm_->size()) {}

  // The order of NCCL's sums is its own; two addends have only one, up to exchange.
  bool deterministic() const override { return size_ == 2; }
  void check(const Request& request) const override;
  std::optional<std::string> refuses_graphs() const override;
  void run(const DeviceCall& call, const c10::Stream& stream) override {
    run(*call.request, stream);
  }
  void run_messages(const Calls& calls, const c10::Stream& stream) override;
  at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) override;

 private:
  void run(const Request& request, const c10::Stream& stream);
  void run_messages(const std::vector<Request>& requests, const c10::Stream& stream);
  void reduce(const Request& request, const c10::Stream& stream);
  void reduce_widened(const Request& request, const c10::Stream& stream);
  void reduce_as_signed(const Request& request, const c10::Stream& stream);
  void reduce_raw(const Request& request, const c10::Stream& stream);
  std::vector<at::Tensor> flags_of_nans(const Request& request, const c10::Stream& stream);
  void all_gather(const Request& request, const c10::Stream& stream);
  void broadcast(const Request& request, const c10::Stream& stream);
  // outputs[r] from rank r, inputs[r] to rank r; undefined or empty: nothing.
  void exchange(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                const c10::Stream& stream);
  std::vector<at::Tensor> parts_of(const std::vector<at::Tensor>& tensors) const;
  bool receives(const Request& request) const;

  const std::shared_ptr<NcclComm> comm_;
  const int rank_, size_;
};

}  // namespace lockstep::comm
