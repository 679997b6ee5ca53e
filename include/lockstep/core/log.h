// Log lines on stderr, tagged with the rank. LOCKSTEP_LOG = trace, debug, info, warn, error or off
// sets the level (default warn; any other value is reported and counts as warn).
#pragma once

#include <string_view>

#include "lockstep/core/compiler.h"

namespace lockstep::log {

// From the finest to the coarsest.
enum class Level { Trace, Debug, Info, Warn, Error };

// From now on lines carry `rank`.
void set_rank(int rank);

// Whether lines of this level are written.
bool enabled(Level level);
// Writes one line, if its level is enabled. From any thread.
void write(Level level, std::string_view text);

// write() at the level of that name.
inline void debug(std::string_view text) { write(Level::Debug, text); }
inline void info(std::string_view text) { write(Level::Info, text); }
inline void warn(std::string_view text) { write(Level::Warn, text); }
inline void error(std::string_view text) { write(Level::Error, text); }

}  // namespace lockstep::log
