// Which ranks are on which hosts.
#pragma once

#include <string>
#include <vector>

namespace lockstep::comm {

// A rank among those of its host.
struct LocalRank {
  int rank = 0;
  int size = 1;  // how many they are
};

// The same on all ranks of a group.
struct Topology {
  // By rank of the group.
  std::vector<int> members;        // the world's number of it
  std::vector<std::string> hosts;  // equal for ranks that share memory
  std::vector<std::string> doors;  // where it is handed memory (see door.h)

  int size() const { return static_cast<int>(members.size()); }
  // The ranks of each host, in order; hosts in the order of their first ranks.
  std::vector<std::vector<int>> by_host() const;
  std::vector<LocalRank> local_ranks() const;  // by rank
  // Of some of the ranks, in the order of the new group.
  Topology of(const std::vector<int>& ranks) const;
};

}  // namespace lockstep::comm
