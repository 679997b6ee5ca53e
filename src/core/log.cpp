#include "lockstep/core/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <string>

namespace lockstep::log {
namespace {

spdlog::level::level_enum to_spdlog(Level level) {
  switch (level) {
    case Level::Trace:
      return spdlog::level::trace;
    case Level::Debug:
      return spdlog::level::debug;
    case Level::Info:
      return spdlog::level::info;
    case Level::Warn:
      return spdlog::level::warn;
    case Level::Error:
      return spdlog::level::err;
  }
  return spdlog::level::off;
}

// A logger of our own: the process-wide default belongs to the user.
spdlog::logger& logger() {
  // Destructors of static objects may log, too.
  static auto& instance = *new spdlog::logger([] {
    spdlog::logger made("lockstep", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    const char* wanted = std::getenv("LOCKSTEP_LOG");
    made.set_pattern("[lockstep] %l: %v");
    made.set_level(spdlog::level::warn);
    if (wanted == nullptr) return made;
    const auto level = spdlog::level::from_str(wanted);  // off for what it does not know
    if (level == spdlog::level::off && std::string(wanted) != "off") {
      made.warn("LOCKSTEP_LOG='{}' is none of trace, debug, info, warn, error, off", wanted);
    } else {
      made.set_level(level);
    }
    return made;
  }());
  return instance;
}

}  // namespace

void set_rank(int rank) {
  logger().set_pattern("[lockstep] rank " + std::to_string(rank) + " %l: %v");
}

bool enabled(Level level) { return logger().should_log(to_spdlog(level)); }

void write(Level level, std::string_view text) {
  logger().log(to_spdlog(level), spdlog::string_view_t(text.data(), text.size()));
}

}  // namespace lockstep::log
