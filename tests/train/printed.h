// A run of a configuration, and what it says.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>

#include "lockstep/train/run.h"
#include "support/folder.h"
#include "support/spawn.h"

namespace lockstep::test {

// A line through 80 points, evaluated on 20.
inline train::RunConfig small_run(const std::string& folder) {
  train::RunConfig config;
  config.model.kind = "linear";
  config.data.kind = "synthetic-regression";
  config.data.synthetic.samples = 100;
  config.data.validation_fraction = 0.2;
  config.optimizer = {.kind = "sgd", .learning_rate = 0.05, .lr_scaling = "linear"};
  config.training = {.epochs = 3, .batch_size = 4, .seed = 1, .metrics = {"mae"}};
  config.checkpoint.save_total_limit = 1;
  config.logging = {.logging_steps = 10, .output_dir = folder};
  return config;
}

// Runs on so many ranks; what rank 0 printed.
inline std::string printed(int ranks, const train::RunConfig& config,
                           const train::Registry& registry = {}) {
  const Folder folder;
  spawn_bare(ranks, [&](int rank) {
    // Plain lines, also where the test's own output is a terminal.
    setenv("TERM", "dumb", 1);
    unsetenv("LOCKSTEP_COLUMNS");
    std::ostringstream out;
    auto* const before = std::cout.rdbuf(out.rdbuf());
    EXPECT_EQ(train::run(config, registry), 0);
    std::cout.rdbuf(before);
    if (rank == 0) write(folder / "out", out.str());
  });
  return contents(folder / "out");
}

}  // namespace lockstep::test
