// Programs on real ranks.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "random/group/program.h"

namespace lockstep::random_group {

struct Setting {
  std::string backend = "shm";  // "solo", "shm", "tcp", "gloo", "host-then-net", "python" (gloo as
                                // Python's ranks speak it), "nccl"
  int ranks = 2;
  std::vector<int> hosts;
  bool in_threads = false;  // half of the programs in a second thread, on a group of its own

  std::string text() const;  // as options of random_group
  Traits traits() const;
};

struct Failure {
  size_t program = 0;
  std::string text;   // by rank
  bool late = false;  // a deadline passed
};

// Runs the programs one after another in one world; each names its own ranks, the same of all. Ends
// at the first failure.
std::optional<Failure> run_in_world(const Setting& setting, const std::vector<Program>& programs,
                                    std::chrono::milliseconds deadline);

// The smallest program that it finds to fail in a world of its own, within `budget`.
struct Shrunk {
  Program program;
  Failure failure;
  int attempts = 0;
};
std::optional<Shrunk> shrink(const Setting& setting, const Program& program,
                             std::chrono::milliseconds deadline, std::chrono::milliseconds budget);

}  // namespace lockstep::random_group
