// Which device this rank computes on.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include <string>

#include "comm/world/topology.h"
#include "lockstep/comm/world.h"

namespace lockstep::comm {

// LOCKSTEP_DEVICE, or else what the options say. Throws ConfigError.
DeviceKind device_from_env(DeviceKind asked);

// What a process can compute on.
struct Devices {
  c10::DeviceType type = c10::DeviceType::CPU;
  int count = 0;             // that it sees, of that type; the CPU is not counted
  bool is_own = false;       // it sees one device only, which is its own for any local rank
  std::string problem = {};  // why there is none, where one was asked for
};

// With Auto the CPU when there is no GPU that libtorch can use.
Devices find_devices(DeviceKind asked);

// The CPU, or the GPU whose number is the local rank; over cuda_ipc ranks share them, in turn.
// Throws ConfigError that says what is missing, and who asks for it, or how many there are for how
// many ranks.
at::Device device_at(const Devices& devices, LocalRank local, Backend backend);

// Makes it the current device.
void take(at::Device device);

}  // namespace lockstep::comm
