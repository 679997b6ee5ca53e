// A program as one rank runs it.
#pragma once

#include <chrono>
#include <stdexcept>

#include "lockstep/comm/world.h"
#include "random/group/program.h"

namespace lockstep::random_group {

// A result is not the reference's.
struct Difference : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Every rank of the group, which is the whole world, calls it. `device`: where memory lies. Throws
// Difference, or what Group threw.
void run(const Group& group, at::Device device, const Program& program,
         std::chrono::milliseconds deadline);

}  // namespace lockstep::random_group
