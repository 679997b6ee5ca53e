// Worlds of processes that run many programs one after another.
#pragma once

#include <chrono>
#include <vector>

#include "random/training/check.h"

namespace lockstep::test::training {

struct Limits {
  // After which a rank gives up waiting for others, and after which silent processes are killed.
  std::chrono::seconds group = std::chrono::seconds(30);
  std::chrono::seconds program = std::chrono::seconds(90);
};

// Runs the programs, which all want the same ranks, backend and hosts. The outcome's digest is of
// all ranks. A program that throws ends its world; the next ones run in a new one.
std::vector<Outcome> run_in_worlds(const std::vector<Program>& programs, const Limits& limits = {});

}  // namespace lockstep::test::training
