#include "comm/cuda_ipc/memory.h"

#include <cstring>
#include <utility>

#include "comm/device/capture.h"

namespace lockstep::comm::cuda_ipc {
namespace {

Properties properties_of(Device device) { return {.location = {.id = device}}; }

size_t rounded(Device device, U64 bytes) {
  const Properties properties = properties_of(device);
  size_t unit = 0;
  check(driver().MemGetAllocationGranularity(&unit, &properties, 0),
        "cuMemGetAllocationGranularity");
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

DeviceMemory DeviceMemory::create(Device device, U64 bytes) {
  DeviceMemory own;
  own.bytes_ = rounded(device, bytes);
  const Properties properties = properties_of(device);
  check(driver().MemCreate(&own.memory_, own.bytes_, &properties, 0), "cuMemCreate");
  own.has_memory_ = true;
  own.map(device);
  check(driver().MemsetD8(own.address_, 0, own.bytes_), "cuMemsetD8");
  // That went to the default stream, for which others do not wait.
  check(driver().StreamSynchronize(nullptr), "cuStreamSynchronize");
  return own;
}

DeviceMemory DeviceMemory::open(const Fd& descriptor, Device device, U64 bytes) {
  DeviceMemory own;
  own.bytes_ = rounded(device, bytes);
  void* handle = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor.get()));
  check(driver().MemImportFromShareableHandle(&own.memory_, handle, kDescriptor),
        "cuMemImportFromShareableHandle");
  own.has_memory_ = true;
  own.map(device);
  return own;
}

void DeviceMemory::map(Device device) {
  check(driver().MemAddressReserve(&address_, bytes_, 0, 0, 0), "cuMemAddressReserve");
  check(driver().MemMap(address_, bytes_, 0, memory_, 0), "cuMemMap");
  is_mapped_ = true;
  // Of another device's memory only where the two reach each other.
  const Access access{.location = {.id = device}};
  check(driver().MemSetAccess(address_, bytes_, &access, 1),
        "cuMemSetAccess, which devices without peer access refuse");
}

Fd DeviceMemory::descriptor() const {
  int fd = -1;
  check(driver().MemExportToShareableHandle(&fd, memory_, kDescriptor, 0),
        "cuMemExportToShareableHandle");
  return Fd(fd);
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  std::swap(has_memory_, other.has_memory_);
  std::swap(is_mapped_, other.is_mapped_);
  return *this;
}

DeviceMemory::~DeviceMemory() {
  if (is_mapped_) driver().MemUnmap(address_, bytes_);
  if (address_ != 0) driver().MemAddressFree(address_, bytes_);
  if (has_memory_) driver().MemRelease(memory_);
}

HostMemory::HostMemory(Context context, size_t bytes) : context_(context) {
  const BesideCaptures beside;
  check(driver().MemHostAlloc(&host_, bytes, kMappedHost), "cuMemHostAlloc");
  std::memset(host_, 0, bytes);
  const int result = driver().MemHostGetDevicePointer(&device_, host_, 0);
  if (result != 0) driver().MemFreeHost(host_);
  check(result, "cuMemHostGetDevicePointer");
}

HostMemory::~HostMemory() {
  const BesideCaptures beside;
  if (driver().CtxPushCurrent(context_) != 0) return;
  driver().MemFreeHost(host_);
  Context gone = nullptr;
  driver().CtxPopCurrent(&gone);
}

}  // namespace lockstep::comm::cuda_ipc
