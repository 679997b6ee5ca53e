// Ranks with a fake device each, in tests.
#pragma once

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>

#include "device/fake/device.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {

// spawn() with a device for each rank and the fake NCCL.
inline std::vector<int> spawn_on_device(int ranks, const std::function<void(World&)>& body,
                                        SpawnOptions options = {}) {
  setenv("LOCKSTEP_DEVICE", "privateuseone", 1);
  setenv("LOCKSTEP_NCCL", FAKE_NCCL, 1);
  const auto statuses = spawn(ranks, body, options);
  unsetenv("LOCKSTEP_DEVICE");
  unsetenv("LOCKSTEP_NCCL");
  return statuses;
}

}  // namespace lockstep::test
