#include <algorithm>
#include <array>

#include "lockstep/rl/embedded.h"

namespace lockstep::rl {
namespace {

// The value of a line "name: value"; empty when there is none.
std::string_view fact(std::string_view scenario, std::string_view name) {
  while (!scenario.empty()) {
    const size_t end = std::min(scenario.find('\n'), scenario.size());
    const auto line = scenario.substr(0, end);
    if (line.starts_with(name) && line.substr(name.size()).starts_with(": ")) {
      return line.substr(name.size() + 2);
    }
    scenario.remove_prefix(std::min(end + 1, scenario.size()));
  }
  return {};
}

bool asks(std::string_view text, std::string_view question) {
  return text.find(question) != std::string_view::npos;
}

std::string_view reply(std::string_view scenario, std::span<const Message> log) {
  const std::string_view text = log.back().content;
  if (!asks(text, "?")) return kStop;
  if (asks(text, "id?")) {
    const auto first = fact(scenario, "first id");
    const auto times = std::count_if(log.begin(), log.end(), [](const Message& message) {
      return message.role == Role::Assistant && asks(message.content, "id?");
    });
    return times == 1 && !first.empty() ? first : fact(scenario, "id");
  }
  constexpr std::array<std::string_view, 4> kOthers = {"item", "zip", "GB", "Confirm"};
  for (const auto name : kOthers) {
    const size_t at = text.find(name);
    if (at == std::string_view::npos || !asks(text, std::string(name) + "?")) continue;
    if (const auto value = fact(scenario, name); !value.empty()) return value;
  }
  return "I do not know.";
}

}  // namespace

Message ScriptedUser::next(const Scene& scene, std::span<const Message> log, uint64_t) {
  const auto said = log.empty() ? fact(scene.scenario, "request") : reply(scene.scenario, log);
  return {.role = Role::User, .content = std::string(said)};
}

}  // namespace lockstep::rl
