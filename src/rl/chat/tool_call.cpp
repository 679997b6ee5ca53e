#include "lockstep/rl/tool_call.h"

#include <utility>

#include "rl/chat/parts.h"
#include "rl/chat/python_json.h"

namespace lockstep::rl {
namespace {

constexpr std::string_view kOpen = "<tool_call>";
constexpr std::string_view kClose = "</tool_call>";

// Thinking may have begun in the prompt, and may have no end.
std::string without_thinking(std::string_view text) {
  const size_t last = text.rfind(kThought);
  if (last != std::string_view::npos) text.remove_prefix(last + kThought.size());
  return std::string(text.substr(0, text.find(kThink)));
}

std::string shortened(std::string text) {
  if (text.size() > 200) text = text.substr(0, 200) + "...";
  return text;
}

// What is wrong with it; nothing when `call` is it.
std::string read_call(std::string_view body, ToolCall& call) {
  try {
    const Json json = parse_nested(body);
    if (!json.is_object()) return "it is not a JSON object";
    const auto name = json.find("name");
    if (name == json.end() || !name->is_string()) return "it has no \"name\" that is a text";
    auto arguments = json.find("arguments");
    if (arguments == json.end()) return "it has no \"arguments\"";
    Json inner;
    const Json* object = &*arguments;
    if (object->is_string()) {
      inner = parse_nested(object->get_ref<const std::string&>());
      object = &inner;
    }
    if (!object->is_object()) return "its \"arguments\" are not an object";
    call.name = name->get<std::string>();
    call.arguments = python_json(*object);
    return "";
  } catch (const Json::exception& error) {
    return "it is not JSON: " + shortened(error.what());
  }
}

}  // namespace

AgentTurn parse_agent_text(std::string_view raw, const ToolCallOptions& options) {
  const std::string kept = without_thinking(raw);
  std::string_view text = kept;
  const auto broken = [](std::string why) { return AgentTurn{.fault = std::move(why)}; };
  size_t open = text.find(kOpen);
  if (open == std::string_view::npos) {
    const auto said = trimmed(text);
    return said.empty() ? broken("the message is empty") : AgentTurn{.text = std::string(said)};
  }
  if (options.mixed == MixedText::Refuse && !trimmed(text.substr(0, open)).empty()) {
    return broken("there is text before <tool_call>");
  }
  AgentTurn turn;
  while (open != std::string_view::npos) {
    text.remove_prefix(open + kOpen.size());
    const size_t close = text.find(kClose);
    if (close == std::string_view::npos) return broken("</tool_call> is missing");
    ToolCall call;
    if (auto fault = read_call(text.substr(0, close), call); !fault.empty()) return broken(fault);
    turn.calls.push_back(std::move(call));
    text.remove_prefix(close + kClose.size());
    open = text.find(kOpen);
    if (!trimmed(text.substr(0, open)).empty()) return broken("there is text after </tool_call>");
  }
  if (turn.calls.size() > 1 && options.parallel == ParallelCalls::Refuse) {
    return broken("there is more than one call");
  }
  return turn;
}

}  // namespace lockstep::rl
