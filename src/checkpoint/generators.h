// libtorch's default CPU generator of each rank.
#pragma once

#include <memory>

#include "lockstep/checkpoint/state.h"

namespace lockstep::checkpoint {

std::shared_ptr<Stateful> generators(int rank);

}  // namespace lockstep::checkpoint
