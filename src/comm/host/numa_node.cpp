#include "comm/host/numa_node.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <system_error>

#include "core/process/cores.h"
#include "lockstep/core/environment.h"

namespace lockstep::comm {

std::optional<int> own_numa_node() {
  if (const auto said = env_int("LOCKSTEP_NUMA_NODE", 0, 1 << 16)) return static_cast<int>(*said);
  return numa_node_of(allowed_cores());
}

std::optional<int> numa_node_of(const std::vector<int>& cores, const std::filesystem::path& root) {
  std::vector<std::filesystem::path> nodes;
  std::error_code error;  // no such directory: nothing is known
  for (const auto& entry :
       std::filesystem::directory_iterator(root / "sys/devices/system/node", error)) {
    const std::string name = entry.path().filename();
    if (name.size() > 4 && name.starts_with("node") && name[4] >= '0' && name[4] <= '9')
      nodes.push_back(entry.path());
  }
  if (nodes.size() < 2 || cores.empty()) return std::nullopt;
  for (const auto& node : nodes) {
    const bool has_all = std::ranges::all_of(cores, [&](int core) {
      return std::filesystem::exists(node / fmt::format("cpu{}", core), error);
    });
    if (has_all) return std::atoi(node.filename().c_str() + 4);
  }
  return std::nullopt;
}

}  // namespace lockstep::comm
