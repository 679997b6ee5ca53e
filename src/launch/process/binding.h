// Which cores a rank may use.
#pragma once

#include <optional>
#include <vector>

#include "launch/job/run.h"

namespace lockstep::launch {

// One core that this process may use.
struct Core {
  int id = 0;
  int node = 0;      // NUMA
  int physical = 0;  // equal for the hardware threads of one core
  bool operator==(const Core&) const = default;
};

// Those of this host, from /sys, in the order of node, physical core and id.
std::vector<Core> usable_cores();

// The ids of those that local rank `local` of `ranks` is bound to; empty for all. With more ranks
// than cores some share one.
std::vector<int> cores_of(Binding binding, int local, int ranks, const std::vector<Core>& cores);
std::vector<int> cores_of(Binding binding, int local, int ranks);

// The threads that a rank gets: its part of the cores, and of those whose time the control groups
// allow, at least one.
int threads_of(Binding binding, int local, int ranks);
// The same of `cores` that are its part, of one of `ranks`.
int threads_for(int cores, int ranks, std::optional<int> allowed);

// Binds this process. Async-signal-safe; what the kernel refuses stays as it was.
void bind_to(const std::vector<int>& cores);

}  // namespace lockstep::launch
