#include "core/process/cgroup.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace lockstep {
namespace {

using std::filesystem::path;

std::optional<int64_t> number_in(const path& file) {
  std::ifstream in(file);
  int64_t number = 0;
  return in >> number ? std::optional(number) : std::nullopt;  // "max" is none
}

// The sum of the numbers after some keys, in a file of "key number" lines.
int64_t sum_in(const path& file, const std::vector<std::string>& keys) {
  std::ifstream in(file);
  int64_t sum = 0, number = 0;
  for (std::string key; in >> key >> number;) {
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) sum += number;
  }
  return sum;
}

struct Hierarchy {
  path mount;
  path group;  // below it; as the host sees it, in a container that does not see its own
  bool unified = false;
};

// The directories of the group and of those around it.
std::vector<path> directories(const Hierarchy& hierarchy) {
  std::vector<path> all;
  for (path group = hierarchy.group.relative_path(); !group.empty(); group = group.parent_path())
    all.push_back(hierarchy.mount / group);
  all.push_back(hierarchy.mount);
  return all;
}

bool names(const std::string& controllers, const std::string& wanted) {
  std::istringstream list(controllers);
  for (std::string one; std::getline(list, one, ',');) {
    if (one == wanted) return true;
  }
  return false;
}

// Where `controller` may be limited: lines of "3:cpu,cpuacct:/a/b", "0::/a/b" for version 2.
std::vector<Hierarchy> hierarchies(const path& root, const std::string& controller) {
  std::vector<Hierarchy> all;
  const path mounts = root / "sys/fs/cgroup";
  std::ifstream file(root / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = first == line.npos ? first : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const path group = line.substr(second + 1);
    if (controllers.empty()) {
      all.push_back({mounts, group, true});
      all.push_back({mounts / "unified", group, true});  // beside version 1
    } else if (names(controllers, controller)) {
      all.push_back({mounts / controllers, group});
      if (controllers != controller) all.push_back({mounts / controller, group});
    }
  }
  return all;
}

template <class T>
void keep_least(std::optional<T>& least, T value) {
  least = least ? std::min(*least, value) : value;
}

}  // namespace

std::optional<int64_t> group_memory_left(const path& root) {
  std::optional<int64_t> least;
  for (const Hierarchy& hierarchy : hierarchies(root, "memory")) {
    for (const path& group : directories(hierarchy)) {
      const bool v2 = hierarchy.unified;
      const auto limit = number_in(group / (v2 ? "memory.max" : "memory.limit_in_bytes"));
      const auto used = number_in(group / (v2 ? "memory.current" : "memory.usage_in_bytes"));
      if (!limit || !used) continue;
      const int64_t files =
          v2 ? sum_in(group / "memory.stat", {"active_file", "inactive_file"})
             : sum_in(group / "memory.stat", {"total_active_file", "total_inactive_file"});
      keep_least(least, std::max<int64_t>(0, *limit - std::max<int64_t>(0, *used - files)));
    }
  }
  return least;
}

std::optional<double> group_cores(const path& root) {
  std::optional<double> least;
  for (const Hierarchy& hierarchy : hierarchies(root, "cpu")) {
    for (const path& group : directories(hierarchy)) {
      int64_t quota = 0, period = 0;
      if (hierarchy.unified) {
        std::ifstream in(group / "cpu.max");  // "max 100000" has no limit
        if (!(in >> quota >> period)) continue;
      } else {
        quota = number_in(group / "cpu.cfs_quota_us").value_or(-1);
        period = number_in(group / "cpu.cfs_period_us").value_or(0);
      }
      if (quota > 0 && period > 0)
        keep_least(least, static_cast<double>(quota) / static_cast<double>(period));
    }
  }
  return least;
}

std::optional<int> whole_group_cores(const path& root) {
  const auto cores = group_cores(root);
  if (!cores) return std::nullopt;
  return static_cast<int>(std::ceil(std::min(*cores, 1e6)));
}

}  // namespace lockstep
