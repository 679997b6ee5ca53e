// Ranks of one host that reach each other's device memory, also several on one device: device
// tensors by kernels of ours, CPU tensors over shared memory.
#pragma once

#include <memory>

#include "comm/device/transport.h"

namespace lockstep::comm {

// As MakeDeviceTransport. Throws ConfigError on all ranks when one cannot take part.
// docs/transports.md says how it differs.
std::shared_ptr<Transport> make_cuda_ipc_transport(const Store& store,
                                                   std::shared_ptr<Transport> cpu,
                                                   const DeviceOptions& options);

}  // namespace lockstep::comm
