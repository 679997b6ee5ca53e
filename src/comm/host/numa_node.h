// The NUMA node that this process runs on.
#pragma once

#include <filesystem>
#include <optional>
#include <vector>

namespace lockstep::comm {

// What LOCKSTEP_NUMA_NODE says, else the node whose cores are all that this process may use.
// Nothing where only one node has cores, or where these are those of several. Throws ConfigError.
std::optional<int> own_numa_node();

// The node that has all of `cores`, as above. `root`: the directory of sys.
std::optional<int> numa_node_of(const std::vector<int>& cores,
                                const std::filesystem::path& root = "/");

}  // namespace lockstep::comm
