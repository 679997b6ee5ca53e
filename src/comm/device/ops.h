// The collectives on one kind of devices, with the meaning that they have on every transport.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <memory>
#include <vector>

#include "comm/device/state.h"

namespace lockstep::comm {

class DeviceOps {
 public:
  using Calls = std::vector<std::shared_ptr<DeviceCall>>;

  virtual ~DeviceOps() = default;
  // Whether sums are taken in the one order.
  virtual bool deterministic() const = 0;
  // Throws ConfigError for what there is no counterpart of.
  virtual void check(const Request& request) const = 0;
  // Why calls cannot be part of a CUDA graph, which is launched again and again; nothing where they
  // can.
  virtual std::optional<std::string> refuses_graphs() const = 0;

  // Puts one call into `stream`, which is the caller's current one.
  virtual void run(const DeviceCall& call, const c10::Stream& stream) = 0;
  // Several messages at once, none of which waits for another.
  virtual void run_messages(const Calls& calls, const c10::Stream& stream) = 0;

  // Zeroed and contiguous, on the group's device, such that calls are fastest. It keeps the
  // communicator, and not the group, whose calls keep the tensors that they use.
  virtual at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) = 0;
};

}  // namespace lockstep::comm
