// Finds settings of this machine that could keep a job from running, or slow it down.
#pragma once

#include <string>
#include <vector>

namespace lockstep::launch {

struct Finding {
  enum Kind { Good, Warning, Problem } kind = Good;
  std::string what;  // "open files: 1024"
  std::string cure;  // of a warning or problem
};

// Looks at cores, memory, shared memory, limits, ports, names and interfaces, clocks, thread
// settings, GPUs, and whether the library with its libtorch loads (`library`: its file, or a name
// that the loader finds). Changes nothing. Takes about as long as libtorch takes to load.
std::vector<Finding> examine_host(const std::string& library);

}  // namespace lockstep::launch
