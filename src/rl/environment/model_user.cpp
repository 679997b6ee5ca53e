#include "lockstep/rl/model_user.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "lockstep/rl/tool_call.h"
#include "rl/chat/guard.h"
#include "rl/chat/parts.h"

namespace lockstep::rl {
namespace {

// The conversation from the other side.
std::vector<Message> as_seen_by_user(const Scene& scene, std::span<const Message> log) {
  std::vector<Message> out;
  const auto add = [&out](const Message& message) {
    switch (message.role) {
      case Role::Assistant:
        if (message.calls.empty() && !message.error) {
          out.push_back({.role = Role::User, .content = message.content});
        }
        break;
      case Role::User:
        out.push_back(
            {.role = Role::Assistant, .content = message.content, .calls = message.calls});
        break;
      case Role::Tool:
        if (message.by == Party::User) out.push_back(message);
        break;
      case Role::System:
        break;
    }
  };
  for (const auto& message : scene.history) add(message);
  for (const auto& message : log) add(message);
  return out;
}

}  // namespace

ModelUser::ModelUser(std::shared_ptr<const Voice> voice, ChatFormat format)
    : voice_(std::move(voice)), format_(format) {}

Message ModelUser::next(const Scene& scene, std::span<const Message> log, uint64_t key) {
  // The form of tau2's system message.
  std::vector<Message> messages = {
      {.role = Role::System,
       .content = fmt::format("{}\n\n<scenario>\n{}\n</scenario>", trimmed(scene.guidelines),
                              scene.scenario)}};
  for (auto& message : as_seen_by_user(scene, log)) messages.push_back(std::move(message));
  const std::string prompt = render(
      guarded(messages), scene.user_tools,
      {.format = format_, .thinking = Thinking::Off, .then = RenderOptions::Then::AgentSpeaks});
  const std::string text(trimmed((*voice_)(prompt, key)));
  if (!scene.user_tools.empty()) {
    auto turn = parse_agent_text(text);
    if (turn.fault.empty() && !turn.calls.empty()) {
      return {.role = Role::User, .calls = std::move(turn.calls)};
    }
  }
  return {.role = Role::User, .content = text.empty() ? std::string(kOutOfScope) : text};
}

}  // namespace lockstep::rl
