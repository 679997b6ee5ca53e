// The cores that this process may use.
#pragma once

#include <vector>

namespace lockstep {

// By number, ascending, as its affinity says; empty when the kernel does not.
std::vector<int> allowed_cores();

}  // namespace lockstep
