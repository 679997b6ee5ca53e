// The ranks of one host whose kernels read each other's memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/cuda_ipc/kernels.h"
#include "comm/cuda_ipc/memory.h"
#include "comm/device/comm.h"
#include "comm/shm/segment.h"

namespace lockstep::comm::cuda_ipc {

class Communicator : public DeviceComm {
 public:
  // For the device of that number. Throws ConfigError when it cannot take part, CommError when the
  // driver refuses something.
  Communicator(int device, int rank, int size);
  ~Communicator() override;

  // Zeroed memory of this rank's, and that of another one.
  DeviceMemory allocate(U64 bytes);
  DeviceMemory open(const Fd& descriptor, U64 bytes);
  // The ranks' memory, memory_bytes(size, stage_bytes) of each, in their order.
  void begin(std::vector<DeviceMemory> memory, U64 stage_bytes);

  // Which device this is, and whether ranks that share it are time-sliced (no MPS) and its streams
  // can wait in place of kernels, which would keep the device from the others for a whole slice.
  Uuid uuid() const;
  bool takes_turns() const;
  int multiprocessors() const;
  // From now on streams wait, in memory that all ranks map: as much as arrivals_bytes(size).
  void wait_on_streams(Segment arrivals);
  static int64_t arrivals_bytes(int size) { return static_cast<int64_t>(sizeof(Arrivals)) * size; }

  std::string_view name() const override { return "cuda_ipc"; }
  // They have met by way of the CPU.
  void connect() override { arrivals_.close_handle(); }
  void close() noexcept override {}
  std::optional<std::string> async_error() override { return std::nullopt; }
  void abort() noexcept override;
  void drain() noexcept override;
  std::optional<ReplayedCall> replayed() const noexcept override;

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
  void launch(Function kernel, unsigned blocks, Call& call, Stream stream,
              unsigned threads = kThreads) {
    launch_with(kernel, blocks, threads, &call, stream);
  }
  const Peers& peers() const { return peers_; }
  // A list that the next kernel reads: the caller keeps it until the device is done with that. Or
  // this does, for a kernel that a CUDA graph runs again.
  template <class Item>
  std::shared_ptr<void> list(const std::vector<Item>& items, const Item*& on_device,
                             bool is_captured) {
    const auto memory = in_context(
        [&] { return std::make_shared<HostMemory>(context_, items.size() * sizeof(Item)); });
    std::copy(items.begin(), items.end(), static_cast<Item*>(memory->data()));
    on_device = reinterpret_cast<const Item*>(memory->on_device());
    if (is_captured) lists_.push_back(memory);
    return memory;
  }

  // Memory that every rank has besides, of the same size. All ranks share it in one order.
  // `forget`s argument is what `share` returned, this rank's; any thread.
  char* share(std::vector<DeviceMemory> memory, U64 bytes);
  void forget(char* own);
  // Where memory of this rank's lies in what all share; nothing for memory that is not shared.
  struct Shared {
    U32 number;  // the same on all ranks, from 1
    U64 offset;
    char* at[kMaxRanks];  // by rank
  };
  std::optional<Shared> find(const char* own) const;
  U64 stage_bytes() const { return stage_bytes_; }
  // Where streams wait: lets `stream`, in which a kernel has told the others that this rank has
  // come, wait for them. What follows begins when they have come, but it may be for other calls.
  void await(uint32_t sequence, Stream stream);

 private:
  template <class Do>
  auto in_context(const Do& act) -> decltype(act()) {
    const Current current(context_);
    return act();
  }
  void launch_with(Function kernel, unsigned blocks, unsigned threads, void* call, Stream stream);

  Device device_ = 0;
  Context context_ = nullptr;
  std::optional<HostWords> words_;
  std::optional<Kernels> kernels_;
  std::vector<DeviceMemory> memory_;  // by rank
  Segment arrivals_;
  Address arrivals_there_ = 0;        // the same for the device
  std::atomic<uint32_t> latest_ = 0;  // meeting
  U64 stage_bytes_ = 0;
  Peers peers_{};
  std::optional<Stream> stream_;
  std::vector<std::shared_ptr<void>> lists_;  // that CUDA graphs read

  struct Region {
    U32 number;
    U64 bytes;
    std::vector<DeviceMemory> memory;  // by rank
  };
  mutable std::mutex mutex_;  // of what follows
  std::map<const char*, Region> regions_;
  U32 last_region_ = 0;
};

}  // namespace lockstep::comm::cuda_ipc
