// The ranks of one host whose kernels read each other's memory.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/cuda_ipc/kernels.h"
#include "comm/cuda_ipc/memory.h"
#include "comm/device/comm.h"

namespace lockstep::comm::cuda_ipc {

class Communicator : public DeviceComm {
 public:
  // Allocates this rank's part for the device of that number. Throws ConfigError when the device
  // cannot take part, CommError when the driver refuses something.
  Communicator(int device, int rank, int size);
  ~Communicator() override;

  // How the others open this rank's memory.
  Fd descriptor() const;
  // Maps that of another rank.
  void add(int rank, const Fd& descriptor);

  std::string_view name() const override { return "cuda_ipc"; }
  // They have met by way of the CPU.
  void connect() override {}
  void close() noexcept override {}
  std::optional<std::string> async_error() override { return std::nullopt; }
  void abort() noexcept override { is_over_->set(); }

  // What follows is for the one thread that makes calls.

  Function copy() {
    return in_context([&] { return kernels_->copy(); });
  }
  Function message() {
    return in_context([&] { return kernels_->message(); });
  }
  Function combine(const Reduction& reduction) {
    return in_context([&] { return kernels_->combine(reduction, peers_.size); });
  }
  // Puts a kernel into `stream`, of which there is one.
  template <class Call>
  void launch(Function kernel, unsigned blocks, Call& call, Stream stream) {
    launch_with(kernel, blocks, &call, stream);
  }
  const Peers& peers() const { return peers_; }

 private:
  template <class Do>
  auto in_context(const Do& act) -> decltype(act()) {
    const Current current(context_);
    return act();
  }
  void launch_with(Function kernel, unsigned blocks, void* call, Stream stream);

  Device device_ = 0;
  Context context_ = nullptr;
  std::optional<HostWord> is_over_;
  std::optional<Kernels> kernels_;
  std::vector<DeviceMemory> memory_;  // by rank
  Peers peers_{};
  std::optional<Stream> stream_;
};

}  // namespace lockstep::comm::cuda_ipc
