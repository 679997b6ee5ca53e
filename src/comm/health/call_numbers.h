// Numbers the calls of a group, so that ranks can compare them.
#pragma once

#include <vector>

#include "comm/health/peer_status.h"
#include "comm/transport.h"

namespace lockstep::comm {

class CallNumbers {
 public:
  static constexpr const char* kCollectives = "all";  // their Notice::lane

  CallNumbers(int rank, int size) : rank_(rank), sent_(size), received_(size) {}

  // The description of the next call for the other ranks. Collectives count in one sequence,
  // messages in one for each pair and direction.
  Notice next(const Request& request);
  uint64_t collectives() const { return collectives_; }

 private:
  const int rank_;
  uint64_t collectives_ = 0;
  std::vector<uint64_t> sent_, received_;
};

}  // namespace lockstep::comm
