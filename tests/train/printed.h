// A run of a configuration, and what it says.
#pragma once

#include <gtest/gtest.h>

#include <iostream>
#include <sstream>
#include <string>

#include "lockstep/train/run.h"
#include "support/folder.h"
#include "support/spawn.h"

namespace lockstep::test {

// Runs on so many ranks; what rank 0 printed.
inline std::string printed(int ranks, const train::RunConfig& config,
                           const train::Registry& registry = {}) {
  const Folder folder;
  spawn_bare(ranks, [&](int rank) {
    std::ostringstream out;
    auto* const before = std::cout.rdbuf(out.rdbuf());
    EXPECT_EQ(train::run(config, registry), 0);
    std::cout.rdbuf(before);
    if (rank == 0) write(folder / "out", out.str());
  });
  return contents(folder / "out");
}

}  // namespace lockstep::test
