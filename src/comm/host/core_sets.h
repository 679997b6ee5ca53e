// Which cores the ranks of a host may use. No torch.
#pragma once

#include <bitset>
#include <vector>

namespace lockstep::comm {

// A bit for each core; none where that is not known.
using CoreSet = std::bitset<4032>;

CoreSet core_set(const std::vector<int>& cores);

// Whether every rank can have a core of its own at the same time. By counts that decide it where
// two sets are always equal, or one in the other, or apart, as bindings of ranks are. False where a
// rank's cores are not known.
bool each_has_a_core(const std::vector<CoreSet>& ranks);

}  // namespace lockstep::comm
