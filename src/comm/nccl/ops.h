// Each collective as calls of NCCL on one stream, with the meaning that it has on every transport.
#pragma once

#include <c10/core/Stream.h>

#include "comm/nccl/communicator.h"
#include "comm/transport.h"

namespace lockstep::comm {

class NcclOps {
 public:
  // `comm` is the caller's and outlives this.
  NcclOps(NcclComm& comm, int rank, int size) : comm_(comm), rank_(rank), size_(size) {}

  // Throws ConfigError for what NCCL has no counterpart of.
  static void check(const Request& request);

  // Puts one request into `stream`, which is the caller's current one.
  void run(const Request& request, const c10::Stream& stream);
  // Several messages at once, none of which waits for another.
  void run_messages(const std::vector<Request>& requests, const c10::Stream& stream);

 private:
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

  NcclComm& comm_;
  const int rank_, size_;
};

}  // namespace lockstep::comm
