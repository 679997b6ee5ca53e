#include "launch/process/binding.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <string>
#include <tuple>

#include "core/process/cgroup.h"
#include "core/process/cores.h"
#include "launch/rendezvous/host.h"
#include "lockstep/core/shard.h"

namespace lockstep::launch {
namespace {

// The number in a file of one; 0 where there is none.
int number_in(const std::string& path) {
  int value = 0;
  std::ifstream(path) >> value;
  return value;
}

Range part(int index, int count, size_t length) {
  return Shard{index, count}.of(static_cast<int64_t>(length));
}

}  // namespace

std::vector<Core> usable_cores() {
  std::vector<Core> found;
  const auto nodes = numa_nodes_of_cores();
  for (const int id : allowed_cores()) {
    const std::string folder = fmt::format("/sys/devices/system/cpu/cpu{}", id);
    // A core's number counts within its socket.
    const int physical = number_in(folder + "/topology/physical_package_id") * 65'536 +
                         number_in(folder + "/topology/core_id");
    const auto node = nodes.find(id);
    found.push_back({id, node == nodes.end() ? 0 : node->second, physical});
  }
  std::sort(found.begin(), found.end(), [](const Core& a, const Core& b) {
    return std::tie(a.node, a.physical, a.id) < std::tie(b.node, b.physical, b.id);
  });
  return found;
}

std::vector<int> cores_of(Binding binding, int local, int ranks, const std::vector<Core>& cores) {
  std::vector<int> ids;
  if (binding == Binding::None || cores.empty()) return ids;
  if (binding == Binding::Cores) {
    const auto count = static_cast<int>(cores.size());
    if (ranks > count) return {cores[static_cast<size_t>(local % count)].id};
    const Range own = part(local, ranks, cores.size());
    for (int64_t i = own.begin; i < own.end; ++i) ids.push_back(cores[static_cast<size_t>(i)].id);
    return ids;
  }
  std::set<int> nodes;
  for (const Core& core : cores) nodes.insert(core.node);
  const auto at = static_cast<int64_t>(local) * static_cast<int64_t>(nodes.size()) / ranks;
  const int node = *std::next(nodes.begin(), at);
  for (const Core& core : cores) {
    if (core.node == node) ids.push_back(core.id);
  }
  return ids;
}

std::vector<int> cores_of(Binding binding, int local, int ranks) {
  return binding == Binding::None ? std::vector<int>{}
                                  : cores_of(binding, local, ranks, usable_cores());
}

int threads_for(int cores, int ranks, std::optional<int> allowed) {
  return std::max(1, allowed ? std::min(cores, *allowed / ranks) : cores);
}

int threads_of(Binding binding, int local, int ranks) {
  const int part = binding == Binding::Cores
                       ? static_cast<int>(cores_of(binding, local, ranks).size())
                       : cores() / ranks;
  return threads_for(part, ranks, whole_group_cores());
}

void bind_to(const std::vector<int>& cores) {
  if (cores.empty()) return;
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (const int id : cores) CPU_SET(id, &mask);
  sched_setaffinity(0, sizeof mask, &mask);
}

}  // namespace lockstep::launch
