// Which host gets which ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launch/rendezvous/network/message.h"

namespace lockstep::launch {

struct Candidate {
  NodeId id = 0;
  uint64_t launcher = 0;
  std::string host;
  int node_rank = -1;
};

// Remembers the order of hosts over a job's attempts, so that ranks stay where they are.
class RankAssignment {
 public:
  // The hosts of the next attempt in the order of their ranks, at most `most` of `candidates`, the
  // first of which is the coordinator's. A given node rank decides. Otherwise a host that had a
  // place keeps it; a lost host's place goes to a launcher on the same host, else to any new one,
  // so that the others' ranks stay; places that stay empty are removed; further new hosts follow by
  // name.
  std::vector<NodeId> seat(std::vector<Candidate> candidates, int most);

 private:
  std::vector<Candidate> before_;
};

// Orders names by the numbers in them: host9 before host10.
bool comes_before(const std::string& a, const std::string& b);

}  // namespace lockstep::launch
