#include "comm/cuda_ipc/communicator.h"

#include <fmt/format.h>

#include "lockstep/core/error.h"

namespace lockstep::comm::cuda_ipc {
namespace {

constexpr unsigned kThreads = 512;
// Since then devices order memory among each other (ld.acquire.sys).
constexpr int kOldest = 70;

int attribute(Device device, Attribute which) {
  int value = 0;
  check(driver().DeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

}  // namespace

Communicator::Communicator(int device, int rank, int size) : memory_(size) {
  if (size > kMaxRanks) {
    throw ConfigError(
        fmt::format("[cuda_ipc] a group of {} ranks, and it is for {} at most: use "
                    "LOCKSTEP_BACKEND=nccl, or fewer ranks",
                    size, kMaxRanks));
  }
  check(driver().DeviceGet(&device_, device), "cuDeviceGet");
  const int version = attribute(device_, MajorVersion) * 10 + attribute(device_, MinorVersion);
  if (version < kOldest || attribute(device_, SharesByDescriptor) == 0) {
    throw ConfigError(fmt::format(
        "[cuda_ipc] device {} (compute capability {}.{}) {}: use LOCKSTEP_BACKEND=nccl", device,
        version / 10, version % 10,
        version < kOldest ? fmt::format("is older than {}.{}", kOldest / 10, kOldest % 10)
                          : "does not share memory by descriptor"));
  }
  check(driver().DevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
  try {
    const Current current(context_);
    is_over_.emplace();
    kernels_.emplace(version);
    memory_[rank] = DeviceMemory::create(device_, memory_bytes(size));
    // What every program needs; the rest is compiled when it is called.
    kernels_->copy();
    kernels_->combine({}, size);
    peers_.memory[rank] = memory_[rank].data();
    peers_.is_over = is_over_->on_device();
    peers_.rank = rank;
    peers_.size = size;
  } catch (...) {
    {
      const Current current(context_);
      memory_.clear();
      kernels_.reset();
      is_over_.reset();
    }
    driver().DevicePrimaryCtxRelease(device_);
    throw;
  }
}

// No kernel may look at what is taken away here.
Communicator::~Communicator() {
  abort();
  if (driver().CtxPushCurrent(context_) != 0) return;
  if (stream_) driver().StreamSynchronize(*stream_);
  memory_.clear();
  kernels_.reset();
  is_over_.reset();
  Context gone = nullptr;
  driver().CtxPopCurrent(&gone);
  driver().DevicePrimaryCtxRelease(device_);
}

Fd Communicator::descriptor() const {
  const Current current(context_);
  return memory_[peers_.rank].descriptor();
}

void Communicator::add(int rank, const Fd& descriptor) {
  const Current current(context_);
  memory_[rank] = DeviceMemory::open(descriptor, device_, memory_bytes(peers_.size));
  peers_.memory[rank] = memory_[rank].data();
}

void Communicator::launch_with(Function kernel, unsigned blocks, void* call, Stream stream) {
  const Current current(context_);
  stream_ = stream;
  void* arguments[] = {call};
  check(driver().LaunchKernel(kernel, blocks, 1, 1, kThreads, 1, 1, 0, stream, arguments, nullptr),
        "cuLaunchKernel");
}

}  // namespace lockstep::comm::cuda_ipc
