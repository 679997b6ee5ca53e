#include "lockstep/core/environment.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>

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
  int64_t value = 0;
  const char* end = text->data() + text->size();
  const auto [stop, status] = std::from_chars(text->data(), end, value);
  if (status != std::errc() || stop != end || value < low || value > high) {
    throw ConfigError(fmt::format("[environment] {}='{}' is not a whole number from {} to {}", name,
                                  *text, low, high));
  }
  return value;
}

bool has_python_peers() { return env_int("LOCKSTEP_PYTHON_PEERS", 0, 1).value_or(0) == 1; }

}  // namespace lockstep
