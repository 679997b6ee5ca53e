// Memory of a device that several processes map. Physical memory goes over by descriptor, and lasts
// until the last process has let go of it: that of a rank that was killed stays readable.
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

// A word of the host's that kernels can read.
class HostWord {
 public:
  HostWord();
  ~HostWord();
  HostWord(const HostWord&) = delete;
  HostWord& operator=(const HostWord&) = delete;

  // Any thread.
  void set() noexcept { __atomic_store_n(host_, 1U, __ATOMIC_SEQ_CST); }
  const volatile U32* on_device() const { return reinterpret_cast<const volatile U32*>(device_); }

 private:
  U32* host_ = nullptr;
  Address device_ = 0;
};

}  // namespace lockstep::comm::cuda_ipc
