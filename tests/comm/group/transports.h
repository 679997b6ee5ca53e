// Tests of a group over each transport that one machine has.
#pragma once

#include <gtest/gtest.h>

#include <functional>

#include "support/spawn.h"

namespace lockstep::test {

class OnTransports : public testing::TestWithParam<Ranks> {
 protected:
  void run(const std::function<void(World&)>& body) { spawn(GetParam(), body); }
  // What needs another rank.
  void run_together(const std::function<void(World&)>& body) {
    if (GetParam().count > 1) run(body);
  }
};

inline const auto kTransports = testing::Values(Ranks{"shm", 1}, Ranks{"shm", 3}, Ranks{"tcp", 3},
                                                Ranks{"gloo", 3}, Ranks{"auto", 4, {0, 0, 1, 1}});

}  // namespace lockstep::test
