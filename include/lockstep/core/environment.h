// Environment variables, read with errors that name them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/core/compiler.h"

namespace lockstep {

// The variable's text; nothing when it is unset or empty.
std::optional<std::string> env_text(const char* name);

// The variable as a whole number in [low, high]; nothing when it is unset or empty.
// Throws ConfigError that quotes name, value and range otherwise.
std::optional<int64_t> env_int(const char* name, int64_t low, int64_t high);

// Whether LOCKSTEP_PYTHON_PEERS says that some ranks of the job are Python processes. Throws
// ConfigError for anything but 0 and 1.
bool has_python_peers();

}  // namespace lockstep
