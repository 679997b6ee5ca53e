#include "train/config/problems.h"

#include <fmt/format.h>

#include <algorithm>

#include "lockstep/core/error.h"

namespace lockstep::train {

void Problems::raise(const std::string& name) {
  if (found_.empty()) return;
  std::stable_sort(found_.begin(), found_.end(), [](const Problem& a, const Problem& b) {
    return a.origin.order < b.origin.order;
  });
  if (found_.size() == 1) {
    throw ConfigError(
        fmt::format("[config] {}: {}", found_.front().origin.text, found_.front().what));
  }
  std::string text = fmt::format("[config] {}: {} errors", name, found_.size());
  for (const auto& [origin, what] : found_) text += fmt::format("\n  {}: {}", origin.text, what);
  throw ConfigError(text);
}

}  // namespace lockstep::train
