#include "comm/host/numa_node.h"

#include <algorithm>

#include "core/process/cores.h"
#include "lockstep/core/environment.h"

namespace lockstep::comm {

std::optional<int> own_numa_node() {
  if (const auto said = env_int("LOCKSTEP_NUMA_NODE", 0, 1 << 16)) return static_cast<int>(*said);
  return numa_node_of(allowed_cores());
}

std::optional<int> numa_node_of(const std::vector<int>& cores, const std::filesystem::path& root) {
  const auto nodes = numa_nodes_of_cores(root);
  const auto node_of = [&](int core) {
    const auto found = nodes.find(core);
    return found == nodes.end() ? -1 : found->second;
  };
  if (cores.empty() || node_of(cores.front()) < 0) return std::nullopt;
  const int own = node_of(cores.front());
  const bool has_all = std::ranges::all_of(cores, [&](int core) { return node_of(core) == own; });
  const bool is_only =
      std::ranges::all_of(nodes, [&](const auto& one) { return one.second == own; });
  return has_all && !is_only ? std::optional(own) : std::nullopt;
}

}  // namespace lockstep::comm
