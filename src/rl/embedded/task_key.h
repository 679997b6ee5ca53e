// Names of tasks.
#pragma once

#include <string_view>

#include "lockstep/rl/environment.h"
#include "rl/embedded/task.h"

namespace lockstep::rl::embedded {

// "17", or "17@1" for one whose difficulty is given. Throws ConfigError for what is no such name,
// and for another domain's.
TaskNumber number_of(const TaskKey& key, Kind kind, int64_t difficulty);

// Throws ConfigError for another name.
Split split_of(std::string_view name);

// Throws ConfigError unless it is 1, 2 or 3.
void check_difficulty(int64_t difficulty);

}  // namespace lockstep::rl::embedded
