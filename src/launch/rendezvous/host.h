// The resources of this host.
#pragma once

namespace lockstep::launch {

// The cores that this process may use.
int cores();

}  // namespace lockstep::launch
