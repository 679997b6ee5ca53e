// Random generators, of which each rank has its own.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/state.h"
#include "lockstep/comm/group.h"

namespace lockstep::checkpoint {

using NamedGenerators = std::vector<std::pair<std::string, at::Generator>>;

// libtorch's default ones: "cpu", and "cuda" for the current device where there are any.
NamedGenerators default_generators();
// Of the ranks of `group`. Where they run lanes all of them draw the same numbers, also those that
// come later.
std::shared_ptr<Stateful> generators(NamedGenerators all, const comm::Group& group);

// How often default generators of this process were restored.
int64_t generators_restored();

}  // namespace lockstep::checkpoint
