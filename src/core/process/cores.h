// The cores that this process may use.
#pragma once

#include <filesystem>
#include <map>
#include <vector>

namespace lockstep {

// Their numbers, ascending, by the process's affinity; empty when the kernel does not give it.
std::vector<int> allowed_cores();

// The NUMA node of each core of this host; empty where the kernel does not say. `root`: the
// directory of sys.
std::map<int, int> numa_nodes_of_cores(const std::filesystem::path& root = "/");

}  // namespace lockstep
