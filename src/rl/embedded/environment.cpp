#include "rl/embedded/environment.h"

#include <algorithm>
#include <array>

#include "core/hash/sha256.h"
#include "rl/embedded/task_key.h"

namespace lockstep::rl::embedded {
namespace {

bool costs_money(Kind kind, std::string_view name) {
  const auto tools = tools_of(kind);
  return std::any_of(tools.begin(), tools.end(),
                     [name](const Tool& tool) { return tool.name == name && tool.costs; });
}

// A call that failed has written nothing.
bool has_failed(const ToolCall& call, std::span<const Message> log) {
  return std::any_of(log.begin(), log.end(), [&](const Message& message) {
    return message.role == Role::Tool && message.error && message.call_id == call.id;
  });
}

// Whether something that costs money was written before the user agreed.
bool paid_unasked(Kind kind, std::span<const Message> log) {
  for (const auto& message : log) {
    // Nothing else makes a user say it: user.cpp.
    if (message.role == Role::User && message.content == "Yes.") return false;
    for (const auto& call : message.calls) {
      if (costs_money(kind, call.name) && !has_failed(call, log)) return true;
    }
  }
  return false;
}

std::string_view last_text(std::span<const Message> log) {
  const auto last = std::find_if(log.rbegin(), log.rend(), [](const Message& message) {
    return message.role == Role::Assistant && message.calls.empty();
  });
  return last == log.rend() ? std::string_view() : last->content;
}

}  // namespace

Scene EmbeddedEnvironment::reset(const TaskKey& key, uint64_t) {
  task_ = make_task(number_of(key, kind_, difficulty_));
  world_ = task_.world;
  looked_up_ = false;
  static const auto schemas = [] {
    std::array<std::vector<std::string>, 3> all;
    for (const Kind kind : {Kind::Airline, Kind::Retail, Kind::Telecom}) {
      for (const Tool& tool : tools_of(kind)) {
        all[static_cast<size_t>(kind)].push_back(schema_of(tool));
      }
    }
    return all;
  }();
  return {.task = key,
          .policy = std::string(policy_of(kind_)),
          .scenario = scenario_of(task_),
          .tools = schemas[static_cast<size_t>(kind_)]};
}

Message EmbeddedEnvironment::call(const ToolCall& call) {
  auto [text, is_error, id] = answer(world_, call.name, call.arguments);
  looked_up_ = looked_up_ || (call.name == lookup_of(kind_) && id == task_.record().id);
  return {.role = Role::Tool,
          .content = std::move(text),
          .call_id = call.id,
          .error = is_error,
          .by = call.by};
}

Reward EmbeddedEnvironment::evaluate(std::span<const Message> log, End why) {
  const auto outcome = task_.clause->outcome;
  World gold = task_.world;
  if (const auto write = write_of(task_, outcome); !write.name.empty()) {
    answer(gold, write.name, write.arguments);
  }
  const bool needs_consent = outcome == Outcome::Consented || outcome == Outcome::Declined;
  const bool state = changed_state(world_) == changed_state(gold);
  // A reference that was guessed counts for nothing.
  const bool told = looked_up_ && why == End::UserStop && last_text(log) == closing(task_, outcome);
  const bool policy = !needs_consent || !paid_unasked(kind_, log);
  return {
      .value = state && told && policy ? 1.0 : 0.0,
      .parts = {{"state", state}, {"told", told}, {"policy", policy}, {"looked_up", looked_up_}}};
}

std::string EmbeddedEnvironment::state_hash() const { return sha256(changed_state(world_)); }

}  // namespace lockstep::rl::embedded
