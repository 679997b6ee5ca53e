// Which device this rank computes on.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "lockstep/comm/world.h"

namespace lockstep::comm {

// LOCKSTEP_DEVICE, or else what the options say. Throws ConfigError.
DeviceKind device_from_env(DeviceKind asked);

// This rank's place among those of its host.
struct Seat {
  int local_rank = 0;
  int local_size = 1;
};

// The CPU, or the GPU whose number is the local rank; a rank that sees a single one takes that.
// With Auto the CPU when there is no GPU that libtorch can use. Sets it as the current device.
// Throws ConfigError that says what is missing, or how many there are for how many ranks.
at::Device choose_device(DeviceKind asked, const Seat& seat);

}  // namespace lockstep::comm
