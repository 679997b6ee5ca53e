#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "core/nearest.h"
#include "core/number.h"
#include "lockstep/rl/embedded.h"
#include "rl/embedded/environment.h"
#include "rl/embedded/task_key.h"

namespace lockstep::rl {

using namespace embedded;

namespace embedded {
namespace {

// The place of `name` in a list of three.
size_t place_of(std::string_view what, std::string_view name,
                std::span<const std::string_view> known) {
  const auto found = std::find(known.begin(), known.end(), name);
  if (found != known.end()) return static_cast<size_t>(found - known.begin());
  throw ConfigError(fmt::format(
      "[rl] EmbeddedDomain: {} '{}' is none of {}{}", what, name, fmt::join(known, ", "),
      hint_of(name, {known.begin(), known.end()}, "; did you mean '", "'?")));
}

int64_t whole_number(std::string_view text, const TaskKey& key) {
  const auto value = whole_number_from<int64_t>(text);
  if (!value || *value < 0) {
    throw ConfigError(fmt::format(
        "[rl] EmbeddedDomain: no task {}: an id is a number, or as '17@1' with a difficulty",
        name_of(key)));
  }
  return *value;
}

}  // namespace

Split split_of(std::string_view name) {
  return static_cast<Split>(place_of("split", name, kSplits));
}

void check_difficulty(int64_t difficulty) {
  if (difficulty < 1 || difficulty > 3) {
    throw ConfigError(
        fmt::format("[rl] EmbeddedDomain: difficulty {}: it is 1, 2 or 3", difficulty));
  }
}

TaskNumber number_of(const TaskKey& key, Kind kind, int64_t difficulty) {
  const auto name = kKinds[static_cast<size_t>(kind)];
  if (key.domain != name) {
    throw ConfigError(
        fmt::format("[rl] EmbeddedDomain: {} is not a task of {}", name_of(key), name));
  }
  const size_t at = key.id.find('@');
  if (at != std::string::npos) {
    difficulty = whole_number(std::string_view(key.id).substr(at + 1), key);
    check_difficulty(difficulty);
  }
  return {.kind = kind,
          .split = split_of(key.split),
          .index = whole_number(std::string_view(key.id).substr(0, at), key),
          .level = difficulty};
}

}  // namespace embedded

std::span<const std::string_view> embedded_domains() { return kKinds; }

Limits embedded_limits(int64_t difficulty) {
  check_difficulty(difficulty);
  return {.max_turns = difficulty == 3 ? 10 : 8};
}

EmbeddedDomain::EmbeddedDomain(std::string_view name, EmbeddedOptions options)
    : kind_(place_of("domain", name, kKinds)), options_(options) {
  check_difficulty(options_.difficulty);
  if (options_.tasks < 1) {
    throw ConfigError(
        fmt::format("[rl] EmbeddedDomain: {} tasks: at least one is needed", options_.tasks));
  }
}

std::string EmbeddedDomain::name() const { return std::string(kKinds[kind_]); }

std::vector<TaskKey> EmbeddedDomain::tasks(std::string_view split) const {
  std::vector<TaskKey> keys;
  for (const auto known : kSplits) {
    if (split != "all" && split_of(split) != split_of(known)) continue;
    for (int64_t i = 0; i < options_.tasks; ++i) keys.push_back(task(known, i));
  }
  return keys;
}

std::unique_ptr<Environment> EmbeddedDomain::make() const {
  return std::make_unique<EmbeddedEnvironment>(static_cast<Kind>(kind_), options_.difficulty);
}

std::vector<ToolCall> EmbeddedDomain::gold_calls(const TaskKey& key) const {
  const Task task = make_task(number_of(key, static_cast<Kind>(kind_), options_.difficulty));
  std::vector<ToolCall> calls;
  for (const auto& line : script(task, task.clause->outcome, Looks::AsNeeded)) {
    for (auto& call : parse_agent_text(line).calls) calls.push_back(std::move(call));
  }
  return calls;
}

TaskKey EmbeddedDomain::task(std::string_view split, int64_t index) const {
  return task(split, index, options_.difficulty);
}

TaskKey EmbeddedDomain::task(std::string_view split, int64_t index, int64_t difficulty) const {
  split_of(split);
  check_difficulty(difficulty);
  if (index < 0) throw ConfigError(fmt::format("[rl] EmbeddedDomain: task {}: below 0", index));
  auto id = std::to_string(index);
  if (difficulty != options_.difficulty) id += fmt::format("@{}", difficulty);
  return {.domain = name(), .split = std::string(split), .id = std::move(id)};
}

}  // namespace lockstep::rl
