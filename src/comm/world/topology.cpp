#include "comm/world/topology.h"

#include <map>

namespace lockstep::comm {

std::vector<std::vector<int>> Topology::by_host() const {
  std::vector<std::vector<int>> result;
  std::map<std::string, size_t> known;
  for (int rank = 0; rank < size(); ++rank) {
    const auto [at, is_new] = known.try_emplace(hosts[rank], result.size());
    if (is_new) result.emplace_back();
    result[at->second].push_back(rank);
  }
  return result;
}

std::vector<LocalRank> Topology::local_ranks() const {
  std::vector<LocalRank> result(members.size());
  for (const auto& ranks : by_host()) {
    for (size_t place = 0; place < ranks.size(); ++place)
      result[ranks[place]] = {static_cast<int>(place), static_cast<int>(ranks.size())};
  }
  return result;
}

Topology Topology::of(const std::vector<int>& ranks) const {
  Topology result;
  for (const int rank : ranks) {
    result.members.push_back(members[rank]);
    result.hosts.push_back(hosts[rank]);
    result.doors.push_back(doors[rank]);
  }
  return result;
}

}  // namespace lockstep::comm
