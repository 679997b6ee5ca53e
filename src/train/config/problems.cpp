#include "train/config/problems.h"

#include <fmt/format.h>

#include <algorithm>

#include "lockstep/core/error.h"

namespace lockstep::train {
namespace {

// The problem on one line, with control characters of the user's text made visible.
std::string line_of(const std::string& place, const std::string& what) {
  std::string line;
  for (const char c : place + ": " + what) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      line += fmt::format("\\x{:02x}", byte);
    } else {
      line += c;
    }
  }
  return line;
}

}  // namespace

void Problems::raise(const std::string& name) {
  if (found_.empty()) return;
  std::stable_sort(found_.begin(), found_.end(), [](const Problem& a, const Problem& b) {
    return a.origin.order < b.origin.order;
  });
  if (found_.size() == 1) {
    throw ConfigError("[config] " + line_of(found_.front().origin.text, found_.front().what));
  }
  std::string text = fmt::format("[config] {}: {} errors", name, found_.size());
  for (const auto& [origin, what] : found_) text += "\n  " + line_of(origin.text, what);
  throw ConfigError(text);
}

}  // namespace lockstep::train
