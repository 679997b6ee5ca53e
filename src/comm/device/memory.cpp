#include "comm/device/memory.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/device/capture.h"
#include "core/process/own_process.h"

namespace lockstep::comm {
namespace {

struct Region {
  void* data;
  at::Device device;
  std::function<void(void*)> release;
  OwnProcess process;

  // False where that has to be put off.
  bool free() const {
    if (!process.is_here()) return true;
    // To wait for the device would invalidate the capture.
    if (is_capturing(device)) return false;
    try {
      c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
    } catch (const std::exception&) {
      // Another stream captures; or the device has failed, and the memory goes with the process.
      return false;
    }
    release(data);
    return true;
  }
};

// Never destroyed: the driver may be gone before.
struct PutOff {
  std::mutex mutex;
  std::vector<Region> all;
  std::atomic<bool> any{false};

  void add(Region region) {
    const std::lock_guard lock(mutex);
    all.push_back(std::move(region));
    any = true;
  }
};
PutOff& put_off() {
  static auto* const only = new PutOff;
  return *only;
}

}  // namespace

void release_put_off() {
  if (!put_off().any) return;
  std::vector<Region> now;
  {
    const std::lock_guard lock(put_off().mutex);
    now.swap(put_off().all);
    put_off().any = false;
  }
  for (Region& region : now) {
    if (!region.free()) put_off().add(std::move(region));
  }
}

at::Tensor tensor_over(void* memory, at::IntArrayRef sizes, const at::TensorOptions& options,
                       std::function<void(void*)> release) {
  const at::Device device = options.device().has_index()
                                ? options.device()
                                : c10::impl::VirtualGuardImpl(options.device().type()).getDevice();
  return at::for_blob(memory, sizes)
      .deleter([own = Region{memory, device, std::move(release), OwnProcess()}](void*) mutable {
        try {
          if (!own.free()) put_off().add(std::move(own));
        } catch (const std::exception&) {
          // The driver is gone: so is the memory with the process.
        }
      })
      .options(options)
      .target_device(options.device())
      .make_tensor();
}

}  // namespace lockstep::comm
