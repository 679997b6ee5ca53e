// Memory of a device that several processes map. Physical memory goes over by descriptor, and lasts
// until no process maps it any more: that of a rank that was killed stays readable.
#pragma once

#include "comm/cuda_ipc/api.h"
#include "comm/cuda_ipc/calls.h"
#include "core/files/fd.h"

namespace lockstep::comm::cuda_ipc {

// All with the device's context current. Throws CommError.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  // Zeroed.
  static DeviceMemory create(Device device, U64 bytes);
  // What another process created, of as many bytes, for `device` to read and write.
  static DeviceMemory open(const Fd& descriptor, Device device, U64 bytes);

  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  ~DeviceMemory();

  char* data() const { return reinterpret_cast<char*>(address_); }
  // By which another process opens it.
  Fd descriptor() const;

 private:
  void map(Device device);

  Memory memory_ = 0;
  Address address_ = 0;
  size_t bytes_ = 0;
  bool has_memory_ = false, is_mapped_ = false;
};

// Memory of the host's that kernels can read and write; zeroed. It is freed in the context in which
// it was made, which has to be there still.
class HostMemory {
 public:
  // `context` is current.
  HostMemory(Context context, size_t bytes);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  void* data() const { return host_; }
  // As the device has it.
  Address on_device() const { return device_; }

 private:
  Context context_ = nullptr;
  void* host_ = nullptr;
  Address device_ = 0;
};

// Words that kernels can read and write.
class HostWords {
 public:
  explicit HostWords(Context context)
      : memory_(context, sizeof(Words)), host_(static_cast<Words*>(memory_.data())) {}

  // Any thread.
  void set_over() noexcept { __atomic_store_n(&host_->is_over, 1U, __ATOMIC_SEQ_CST); }
  Replays replays() const noexcept {
    return {.running = __atomic_load_n(&host_->replays.running, __ATOMIC_SEQ_CST),
            .ended = __atomic_load_n(&host_->replays.ended, __ATOMIC_SEQ_CST),
            .collectives = __atomic_load_n(&host_->replays.collectives, __ATOMIC_SEQ_CST)};
  }
  // As the device has them.
  const volatile U32* is_over() const { return &on_device()->is_over; }
  volatile Replays* replays_on_device() const { return &on_device()->replays; }

 private:
  struct Words {
    U32 is_over;
    Replays replays;
  };
  Words* on_device() const { return reinterpret_cast<Words*>(memory_.on_device()); }

  const HostMemory memory_;
  Words* const host_;
};

}  // namespace lockstep::comm::cuda_ipc
