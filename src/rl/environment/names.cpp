#include <fmt/format.h>

#include <string>
#include <string_view>

#include "lockstep/rl/environment.h"
#include "lockstep/rl/message.h"

namespace lockstep::rl {

std::string_view name_of(Role role) {
  switch (role) {
    case Role::System:
      return "system";
    case Role::User:
      return "user";
    case Role::Assistant:
      return "assistant";
    case Role::Tool:
      return "tool";
  }
  return "?";
}

std::string_view name_of(End why) {
  switch (why) {
    case End::None:
      return "none";
    case End::AgentStop:
      return "agent_stop";
    case End::UserStop:
      return "user_stop";
    case End::MaxTurns:
      return "max_turns";
    case End::MaxErrors:
      return "max_errors";
    case End::BadCall:
      return "bad_call";
    case End::TooLong:
      return "too_long";
    case End::ContextFull:
      return "context_full";
    case End::EnvError:
      return "env_error";
  }
  return "?";
}

std::string name_of(const TaskKey& key) {
  return fmt::format("{}/{}/{}", key.domain, key.split, key.id);
}

}  // namespace lockstep::rl
