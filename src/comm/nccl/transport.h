// Ranks with a GPU each, on one host or several: device tensors over NCCL, CPU tensors over the
// transport for CPUs that suits the ranks.
#pragma once

#include <memory>

#include "comm/store/store.h"
#include "comm/transport.h"
#include "comm/world/topology.h"

namespace lockstep::comm {

struct NcclOptions {
  at::Device device;  // this rank's
  Topology layout;
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

// Every rank calls it, with `cpu` over the same ranks and a store under the same prefix. Blocks
// until all have connected. Throws ConfigError on all ranks when one has no usable NCCL library or
// another version than rank 0, CommError when they cannot connect. docs/transports.md says how it
// differs from the other transports.
std::shared_ptr<Transport> make_nccl_transport(const Store& store, std::shared_ptr<Transport> cpu,
                                               const NcclOptions& options);

}  // namespace lockstep::comm
