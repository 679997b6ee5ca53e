// Ranks with fake devices that read each other's memory, in tests.
#pragma once

#include <cstdlib>
#include <functional>
#include <vector>

#include "device/on_device.h"

namespace lockstep::test {

// spawn() with a device for each rank, and cuda_ipc over the fake driver. As many devices as
// FAKE_DEVICES says, which ranks share where there are fewer.
inline std::vector<int> spawn_on_ipc(int ranks, const std::function<void(World&)>& body,
                                     SpawnOptions options = {}) {
  setenv("LOCKSTEP_DEVICE", "privateuseone", 1);
  setenv("LOCKSTEP_CUDA_DRIVER", FAKE_CUDA, 1);
  setenv("LOCKSTEP_NVRTC", FAKE_CUDA, 1);
  options.backend = "cuda_ipc";
  const auto statuses = spawn(ranks, body, options);
  unsetenv("LOCKSTEP_DEVICE");
  unsetenv("LOCKSTEP_CUDA_DRIVER");
  unsetenv("LOCKSTEP_NVRTC");
  return statuses;
}

}  // namespace lockstep::test
