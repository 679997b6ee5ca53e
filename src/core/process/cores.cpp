#include "core/process/cores.h"

#include <sched.h>

#include <cerrno>
#include <fstream>
#include <memory>
#include <optional>
#include <string_view>
#include <system_error>

#include "core/number.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// "node3" -> 3
std::optional<int> node_of_name(std::string_view name) {
  constexpr std::string_view kNode = "node";
  if (!name.starts_with(kNode)) return std::nullopt;
  return whole_number_from<int>(name.substr(kNode.size()));
}

}  // namespace

std::vector<int> allowed_cores() {
  std::vector<int> ids;
  // The kernel refuses a mask that is narrower than its own.
  for (int most = CPU_SETSIZE; most <= 1 << 20; most *= 4) {
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> mask(
        CPU_ALLOC(most), [](cpu_set_t* set) { CPU_FREE(set); });
    const size_t bytes = CPU_ALLOC_SIZE(most);
    if (sched_getaffinity(0, bytes, mask.get()) == 0) {
      for (int id = 0; id < most; ++id) {
        if (CPU_ISSET_S(id, bytes, mask.get())) ids.push_back(id);
      }
      break;
    }
    if (errno != EINVAL) break;
  }
  return ids;
}

std::map<int, int> numa_nodes_of_cores(const fs::path& root) {
  std::map<int, int> nodes;
  std::error_code error;
  for (const auto& folder : fs::directory_iterator(root / "sys/devices/system/node", error)) {
    const auto node = node_of_name(folder.path().filename().string());
    if (!node) continue;
    // "0-3,8"; on hosts with much memory the folder itself has thousands of entries.
    std::ifstream list(folder.path() / "cpulist");
    for (int first = 0, last = 0; list >> first; list.ignore(1, ',')) {
      last = first;
      if (list.peek() == '-') list.ignore() >> last;
      for (int core = first; core <= last; ++core) nodes.emplace(core, *node);
    }
  }
  return nodes;
}

}  // namespace lockstep
