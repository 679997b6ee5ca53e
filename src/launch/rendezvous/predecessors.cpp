#include "launch/rendezvous/predecessors.h"

#include <algorithm>

namespace lockstep::launch {
namespace {

// The one that was replaced has ended, and the kernel has ended its ranks with it.
constexpr NodeId kCoordinator = 1;

}  // namespace

void Predecessors::note(const Past& past, uint64_t own, Time fence) {
  if (past.coordinator == 0 || past.coordinator == own || past.epoch == 0) return;
  Epoch& epoch = epochs_[past.coordinator];
  if (past.epoch < epoch.number) return;
  if (past.epoch > epoch.number) {
    // The first word of it counts: ranks of that coordinator were being stopped by then.
    epoch = {past.epoch, past.hosts, {kCoordinator}, epoch.number == 0 ? fence : epoch.until};
  }
  if (past.id != 0 && !past.has_ranks) epoch.over.insert(past.id);
}

Time Predecessors::fenced_until() const {
  Time until{};
  for (const auto& [coordinator, epoch] : epochs_) {
    if (epoch.over.size() < epoch.hosts) until = std::max(until, epoch.until);
  }
  return until;
}

}  // namespace lockstep::launch
