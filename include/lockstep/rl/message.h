// What an agent, a user and tools say to each other.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/compiler.h"

namespace lockstep::rl {

// Who speaks.
enum class Role { System, User, Assistant, Tool };

// Who calls a tool. A user may have tools of his own: the phone in tau2's telecom.
enum class Party { Agent, User };

// A call of a tool.
struct ToolCall {
  std::string id;                // which result answers it
  std::string name;              // the tool's
  std::string arguments = "{}";  // the text of a JSON object
  Party by = Party::Agent;

  bool operator==(const ToolCall&) const = default;
};

// One message. An agent's (or user's) has either content or calls.
struct Message {
  Role role = Role::User;
  std::string content = "";
  std::vector<ToolCall> calls = {};
  std::string call_id = "";  // a tool's: which call it answers
  // A tool's: the call failed. An agent's: the text was malformed, and was not passed on.
  bool error = false;
  Party by = Party::Agent;     // a tool's: who called it
  std::string reasoning = "";  // an agent's: what it thought first, where it is known apart

  bool operator==(const Message&) const = default;
};

// "system", "user", "assistant" or "tool".
std::string_view name_of(Role role);

}  // namespace lockstep::rl
