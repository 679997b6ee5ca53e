// Ranks with a GPU each, on one host or several: device tensors over NCCL, CPU tensors over the
// transport for CPUs that suits the ranks.
#pragma once

#include <memory>

#include "comm/device/transport.h"

namespace lockstep::comm {

// Every rank calls it, with `cpu` over the same ranks and a store under the same prefix. Blocks
// until all have connected. Throws ConfigError on all ranks when one has no usable NCCL library or
// another version than rank 0, CommError when they cannot connect. docs/transports.md says how it
// differs from the other transports.
std::shared_ptr<Transport> make_nccl_transport(const Store& store, std::shared_ptr<Transport> cpu,
                                               const DeviceOptions& options);

}  // namespace lockstep::comm
