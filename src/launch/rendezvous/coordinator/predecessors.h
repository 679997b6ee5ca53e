// What a coordinator learns of earlier coordinators of the job: one that was killed and replaced at
// once must not start ranks beside those of its predecessor.
#pragma once

#include <cstdint>
#include <map>
#include <set>

#include "launch/rendezvous/network/message.h"

namespace lockstep::launch {

// Pure, as the coordinator.
class Predecessors {
 public:
  // `own`: the coordinator's launcher. A launcher asks for a place; what it knows of another
  // coordinator is recorded, and a launcher that had ranks then has none once it reports so.
  void note(const Past& past, uint64_t own, Time fence);
  // When the last ranks of earlier coordinators must have ended.
  Time fenced_until() const;
  void clear() { attempts_.clear(); }

 private:
  struct Attempt {
    uint32_t number = 0;  // the last one that any launcher knows of
    uint32_t hosts = 0;
    std::set<NodeId> over;  // have no ranks left
    Time until{};
  };
  std::map<uint64_t, Attempt> attempts_;  // by coordinator
};

}  // namespace lockstep::launch
