// Which ranks are on which hosts.
#pragma once

#include <string>
#include <vector>

namespace lockstep::comm {

// The same on all ranks of a group.
struct Topology {
  // By rank of the group.
  std::vector<int> members;        // the world's number of it
  std::vector<std::string> hosts;  // equal for ranks that share memory
  std::vector<std::string> doors;  // where it is handed memory (see door.h)

  int size() const { return static_cast<int>(members.size()); }
  // The ranks of each host, in order; hosts in the order of their first ranks.
  std::vector<std::vector<int>> by_host() const;
  // By rank: its place among the ranks of its host, and how many those are.
  struct LocalPlace {
    int place = 0, count = 0;
  };
  std::vector<LocalPlace> local_places() const;
  // Of some of the ranks, in the order of the new group.
  Topology of(const std::vector<int>& ranks) const;
};

}  // namespace lockstep::comm
