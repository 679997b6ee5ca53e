// Runs a program on a rank and compares what comes of it.
#pragma once

#include <string>

#include "lockstep/comm/world.h"
#include "random/training/program.h"

namespace lockstep::test::training {

struct Outcome {
  bool good = false;
  // Of this rank's final state, to be compared with those of other variants.
  std::string digest;
  // What went wrong; empty when nothing.
  std::string error;
};

// Every rank calls it. Throws what the program threw; a difference is no exception, and the world
// can go on.
Outcome run_on_rank(const Program& program, World& world);

}  // namespace lockstep::test::training
