#include "comm/device/memory.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "core/process/own_process.h"

namespace lockstep::comm {

at::Tensor tensor_over(void* memory, at::IntArrayRef sizes, const at::TensorOptions& options,
                       std::function<void(void*)> release) {
  const c10::impl::VirtualGuardImpl device(options.device().type());
  const c10::DeviceIndex index =
      options.device().has_index() ? options.device().index() : device.getDevice().index();
  return at::for_blob(memory, sizes)
      .deleter([device, index, release = std::move(release), process = OwnProcess()](void* gone) {
        if (!process.is_here()) return;
        try {
          device.synchronizeDevice(index);
          release(gone);
        } catch (const std::exception&) {
          // The device has failed, or the driver is gone: so is the memory with the process.
        }
      })
      .options(options)
      .target_device(options.device())
      .make_tensor();
}

}  // namespace lockstep::comm
