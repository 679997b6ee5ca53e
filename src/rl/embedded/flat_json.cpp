#include "rl/embedded/flat_json.h"

#include <algorithm>

#include "rl/chat/python_json.h"

namespace lockstep::rl::embedded {

FlatJson::FlatJson(std::string_view json) {
  const auto parsed = Json::parse(json.begin(), json.end(), nullptr, false);
  if (!parsed.is_object()) return;
  for (const auto& [name, value] : parsed.items()) {
    members_.emplace_back(
        name, value.is_string() ? std::optional(value.get<std::string>()) : std::nullopt);
  }
}

bool FlatJson::has(std::string_view name) const {
  return std::any_of(members_.begin(), members_.end(),
                     [name](const auto& member) { return member.first == name; });
}

std::optional<std::string> FlatJson::text(std::string_view name) const {
  for (const auto& [known, value] : members_) {
    if (known == name) return value;
  }
  return std::nullopt;
}

}  // namespace lockstep::rl::embedded
