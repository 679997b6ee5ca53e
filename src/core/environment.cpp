#include "lockstep/core/environment.h"

#include <fmt/format.h>

#include <cstdlib>

#include "core/number.h"
#include "lockstep/core/error.h"

namespace lockstep {

std::optional<std::string> env_text(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return std::nullopt;
  return text;
}

std::optional<int64_t> env_int(const char* name, int64_t low, int64_t high) {
  const auto text = env_text(name);
  if (!text) return std::nullopt;
  const auto value = whole_number_from<int64_t>(*text);
  if (!value || *value < low || *value > high) {
    throw ConfigError(fmt::format("[environment] {}='{}' is not a whole number from {} to {}", name,
                                  *text, low, high));
  }
  return value;
}

bool has_python_peers() { return env_int("LOCKSTEP_PYTHON_PEERS", 0, 1).value_or(0) == 1; }

}  // namespace lockstep
