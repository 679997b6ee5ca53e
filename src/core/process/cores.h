// The cores that this process may use.
#pragma once

#include <vector>

namespace lockstep {

// Their numbers, ascending, by the process's affinity; empty when the kernel does not give it.
std::vector<int> allowed_cores();

}  // namespace lockstep
