#include "launch/rendezvous/coordinator/predecessors.h"

#include <algorithm>

namespace lockstep::launch {
namespace {

// The one that was replaced has ended, and the kernel has ended its ranks with it.
constexpr NodeId kCoordinator = 1;

}  // namespace

void Predecessors::note(const Past& past, uint64_t own, Time fence) {
  if (past.coordinator == 0 || past.coordinator == own || past.attempt == 0) return;
  Attempt& attempt = attempts_[past.coordinator];
  if (past.attempt < attempt.number) return;
  if (past.attempt > attempt.number) {
    // The first report of it counts: ranks of that coordinator were being stopped by then.
    attempt = {
        past.attempt, past.hosts, {kCoordinator}, attempt.number == 0 ? fence : attempt.until};
  }
  if (past.id != 0 && !past.has_ranks) attempt.over.insert(past.id);
}

Time Predecessors::fenced_until() const {
  Time until{};
  for (const auto& [coordinator, attempt] : attempts_) {
    if (attempt.over.size() < attempt.hosts) until = std::max(until, attempt.until);
  }
  return until;
}

}  // namespace lockstep::launch
