// Groups that may have lost some of their episodes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/rl/grpo.h"

namespace lockstep::rl {

// The sizes of groups of one size. Throws ConfigError where the episodes are not whole groups.
std::vector<int64_t> whole_groups(size_t episodes, int64_t group_size);

// As those of grpo.h, of groups of these sizes, all above 0, one after another.
std::vector<double> advantages(std::span<const double> rewards, std::span<const int64_t> groups,
                               ScaleRewards scale);
std::vector<uint8_t> equal_groups(std::span<const double> rewards, std::span<const int64_t> groups);

}  // namespace lockstep::rl
