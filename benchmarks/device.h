// Times on a device: a program has enqueued work when a call returns, not done it.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>

namespace bench {

// Waits for all that was enqueued. Nothing on the CPU.
inline void finish(at::Device device) {
  if (device.is_cpu()) return;
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

}  // namespace bench
