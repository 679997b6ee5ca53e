#include "comm/cuda_ipc/communicator.h"

#include <fmt/format.h>

#include <utility>

#include "comm/device/capture.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::cuda_ipc {
namespace {

// Since then devices order memory among each other (ld.acquire.sys).
constexpr int kOldest = 70;

int attribute(Device device, Attribute which) {
  int value = 0;
  check(driver().DeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

}  // namespace

Communicator::Communicator(int device, int rank, int size) {
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
    words_.emplace(context_);
    kernels_.emplace(version);
    // What every program needs; the rest is compiled when it is called.
    kernels_->copy();
    kernels_->combine({}, size);
    peers_.is_over = words_->is_over();
    peers_.replays = words_->replays_on_device();
    peers_.rank = rank;
    peers_.size = size;
  } catch (...) {
    {
      const Current current(context_);
      memory_.clear();
      kernels_.reset();
      words_.reset();
    }
    driver().DevicePrimaryCtxRelease(device_);
    throw;
  }
}

// No kernel may look at what is taken away here.
Communicator::~Communicator() {
  const BesideCaptures beside;
  abort();
  if (driver().CtxPushCurrent(context_) != 0) return;
  if (stream_) driver().StreamSynchronize(*stream_);
  if (arrivals_there_ != 0) driver().MemHostUnregister(arrivals_.data());
  memory_.clear();
  regions_.clear();
  lists_.clear();
  kernels_.reset();
  words_.reset();
  Context gone = nullptr;
  driver().CtxPopCurrent(&gone);
  driver().DevicePrimaryCtxRelease(device_);
}

DeviceMemory Communicator::allocate(U64 bytes) {
  const Current current(context_);
  return DeviceMemory::create(device_, bytes);
}

DeviceMemory Communicator::open(const Fd& descriptor, U64 bytes) {
  const Current current(context_);
  return DeviceMemory::open(descriptor, device_, bytes);
}

void Communicator::begin(std::vector<DeviceMemory> memory, U64 stage_bytes) {
  memory_ = std::move(memory);
  stage_bytes_ = stage_bytes;
  for (size_t r = 0; r < memory_.size(); ++r) peers_.memory[r] = memory_[r].data();
}

char* Communicator::share(std::vector<DeviceMemory> memory, U64 bytes) {
  char* own = memory[peers_.rank].data();
  const std::lock_guard lock(mutex_);
  // As many as a word of Flags::where has bits for.
  last_region_ = last_region_ % 0xffffff + 1;
  regions_.insert({own, Region{last_region_, bytes, std::move(memory)}});
  return own;
}

void Communicator::forget(char* own) {
  const Current current(context_);
  const std::lock_guard lock(mutex_);
  regions_.erase(own);
}

std::optional<Communicator::Shared> Communicator::find(const char* own) const {
  const std::lock_guard lock(mutex_);
  auto after = regions_.upper_bound(own);
  if (after == regions_.begin()) return std::nullopt;
  const auto& [begin, region] = *--after;
  const auto offset = static_cast<U64>(own - begin);
  if (offset >= region.bytes) return std::nullopt;
  Shared shared{.number = region.number, .offset = offset, .at = {}};
  for (size_t r = 0; r < region.memory.size(); ++r) shared.at[r] = region.memory[r].data() + offset;
  return shared;
}

Uuid Communicator::uuid() const {
  Uuid own;
  if (driver().DeviceGetUuid != nullptr)
    check(driver().DeviceGetUuid(&own, device_), "cuDeviceGetUuid");
  return own;
}

int Communicator::multiprocessors() const { return attribute(device_, Multiprocessors); }

bool Communicator::takes_turns() const {
  if (!driver().has_waiting_streams()) return false;
  // A driver may be too old to know what is asked.
  int waits = 0, has_mps = 0;
  driver().DeviceGetAttribute(&waits, WaitsFor64Bits, device_);
  driver().DeviceGetAttribute(&has_mps, HasMps, device_);
  return waits != 0 && has_mps == 0;
}

void Communicator::wait_on_streams(Segment arrivals) {
  const Current current(context_);
  arrivals_ = std::move(arrivals);
  const auto bytes = static_cast<size_t>(arrivals_.size());
  check(driver().MemHostRegister(arrivals_.data(), bytes, kRegistered), "cuMemHostRegister");
  const int result = driver().MemHostGetDevicePointer(&arrivals_there_, arrivals_.data(), 0);
  if (result != 0) driver().MemHostUnregister(arrivals_.data());
  check(result, "cuMemHostGetDevicePointer");
  peers_.arrivals = reinterpret_cast<Arrivals*>(arrivals_there_);
}

void Communicator::await(uint32_t sequence, Stream stream) {
  const Current current(context_);
  stream_ = stream;
  latest_ = sequence;
  for (int peer = 0; peer < peers_.size; ++peer) {
    if (peer == peers_.rank) continue;
    const U64 index = static_cast<U64>(peer) * kMeetings + sequence % kMeetings;
    const Address own = arrivals_there_ + static_cast<U64>(peers_.rank) * sizeof(Arrivals);
    check(driver().StreamWaitValue64(stream, own + index * sizeof(U64), U64{sequence} << 32,
                                     kAtLeast),
          "cuStreamWaitValue64");
  }
}

// Kernels look at the word; what streams wait for gets values beyond all that are waited for, in
// the sense of a comparison that goes round.
void Communicator::abort() noexcept {
  words_->set_over();
  if (arrivals_there_ == 0) return;
  const U64 beyond = (U64{latest_} << 32) + (U64{1} << 62);
  auto& own = reinterpret_cast<Arrivals*>(arrivals_.data())[peers_.rank].arrived;
  for (auto& of_peer : own) {
    for (U64& each : of_peer) __atomic_store_n(&each, beyond, __ATOMIC_SEQ_CST);
  }
}

std::optional<ReplayedCall> Communicator::replayed() const noexcept {
  const Replays now = words_->replays();
  if (now.running == 0) return std::nullopt;
  return ReplayedCall{.number = now.running, .before = now.ended, .collectives = now.collectives};
}

void Communicator::drain() noexcept {
  const BesideCaptures beside;
  if (!stream_ || driver().CtxPushCurrent(context_) != 0) return;
  driver().StreamSynchronize(*stream_);
  Context gone = nullptr;
  driver().CtxPopCurrent(&gone);
}

void Communicator::launch_with(Function kernel, unsigned blocks, unsigned threads, void* call,
                               Stream stream) {
  const Current current(context_);
  stream_ = stream;
  void* arguments[] = {call};
  check(driver().LaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, nullptr),
        "cuLaunchKernel");
}

}  // namespace lockstep::comm::cuda_ipc
