#include "comm/host/core_sets.h"

#include <algorithm>
#include <cstddef>

namespace lockstep::comm {

CoreSet core_set(const std::vector<int>& cores) {
  CoreSet set;
  for (const int core : cores) {
    if (static_cast<size_t>(core) < set.size()) set.set(static_cast<size_t>(core));
  }
  return set;
}

bool each_has_a_core(const std::vector<CoreSet>& ranks) {
  CoreSet all;
  for (const CoreSet& set : ranks) all |= set;
  if (all.count() < ranks.size()) return false;
  return std::ranges::all_of(ranks, [&](const CoreSet& set) {
    const auto rivals =
        std::ranges::count_if(ranks, [&](const CoreSet& other) { return (other & ~set).none(); });
    return static_cast<size_t>(rivals) <= set.count();
  });
}

}  // namespace lockstep::comm
