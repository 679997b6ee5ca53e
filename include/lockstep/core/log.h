// Log lines on stderr, tagged with the rank. LOCKSTEP_LOG = trace, debug, info, warn, error or off sets the level
// (default warn; another word is warned of and counts as warn).
#pragma once

#include <string_view>

namespace lockstep::log {

enum class Level { Trace, Debug, Info, Warn, Error };

// From now on lines carry `rank`.
void set_rank(int rank);

bool enabled(Level level);
void write(Level level, std::string_view text);

inline void debug(std::string_view text) { write(Level::Debug, text); }
inline void info(std::string_view text) { write(Level::Info, text); }
inline void warn(std::string_view text) { write(Level::Warn, text); }
inline void error(std::string_view text) { write(Level::Error, text); }

}  // namespace lockstep::log
