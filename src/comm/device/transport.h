// A transport for tensors on devices beside one for CPUs: streams, failures and what else is the
// same on all kinds of devices.
#pragma once

#include <memory>

#include "comm/device/ops.h"
#include "comm/device/state.h"
#include "comm/store/store.h"
#include "comm/transport.h"
#include "comm/world/topology.h"

namespace lockstep::comm {

struct DeviceOptions {
  at::Device device;  // this rank's
  Topology layout;
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  // Of the world, on the device that has most of its ranks: of groups that the world's group has
  // made. 0: this is the world's group.
  int ranks_on_one = 0;
};

// Makes such a transport. Every rank calls it, with `cpu` over the same ranks and a store under the
// same prefix.
using MakeDeviceTransport = std::shared_ptr<Transport> (*)(const Store& store,
                                                           std::shared_ptr<Transport> cpu,
                                                           const DeviceOptions& options);

// What one is made of. CPU tensors, byte strings and barriers go over `cpu`; what ends one half
// ends the other.
struct DeviceParts {
  std::shared_ptr<Transport> cpu;
  std::shared_ptr<DeviceComm> comm;
  std::unique_ptr<DeviceOps> ops;  // over `comm`
  std::vector<int> pids;           // of the ranks on this host; 0 for the others
  MakeDeviceTransport again;       // for subsets
};
// Connects; blocks until all ranks have. Throws CommError.
std::shared_ptr<Transport> make_device_transport(const Store& store, DeviceParts parts,
                                                 const DeviceOptions& options);

}  // namespace lockstep::comm
