#include "lockstep/rl/chat.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "core/nearest.h"
#include "rl/chat/parts.h"

namespace lockstep::rl {
namespace {

constexpr std::string_view kEnd = "<|im_end|>";
constexpr std::string_view kToolsBefore =
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are "
    "provided with function signatures within <tools></tools> XML tags:\n<tools>";
constexpr std::string_view kToolsAfter =
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, "
    "\"arguments\": <args-json-object>}\n</tool_call>";

std::string_view without_leading_lines(std::string_view text) {
  return text.substr(std::min(text.find_first_not_of('\n'), text.size()));
}

std::string_view without_last_lines(std::string_view text) {
  return text.substr(0, text.find_last_not_of('\n') + 1);
}

// An earlier thought is not shown again: the thought and the rest.
std::pair<std::string_view, std::string_view> thought_of(const Message& message) {
  const std::string_view content = message.content;
  if (!message.reasoning.empty()) return {message.reasoning, content};
  const size_t end = content.find(kThought);
  if (end == std::string_view::npos) return {"", content};
  auto thought = without_last_lines(content.substr(0, end));
  if (const size_t begin = thought.rfind(kThink); begin != std::string_view::npos) {
    thought.remove_prefix(begin + kThink.size());
  }
  const auto rest = content.substr(content.rfind(kThought) + kThought.size());
  return {without_leading_lines(thought), without_leading_lines(rest)};
}

void add_calls(std::span<const ToolCall> calls, std::string& out, bool begins_line) {
  for (const auto& call : calls) {
    if (!begins_line) out += '\n';
    begins_line = false;
    out += fmt::format("<tool_call>\n{{\"name\": \"{}\", \"arguments\": {}}}\n</tool_call>",
                       call.name, call.arguments);
  }
}

// Renders message after message.
class Renderer {
 public:
  Renderer(std::span<const Message> messages, const RenderOptions& options)
      : messages_(messages), thinks_(options.format == ChatFormat::Qwen3) {
    const auto is_query = [](const Message& message) {
      return message.role == Role::User && !(message.content.starts_with("<tool_response>") &&
                                             message.content.ends_with("</tool_response>"));
    };
    const auto last = std::find_if(messages.rbegin(), messages.rend(), is_query);
    // Without any the template takes the last message.
    last_query_ = last == messages.rend()
                      ? messages.size()
                      : messages.size() - static_cast<size_t>(last - messages.rbegin());
  }

  void add(size_t at, std::string& out) const {
    const Message& message = messages_[at];
    switch (message.role) {
      case Role::System:
      case Role::User:
        out +=
            fmt::format("<|im_start|>{}\n{}<|im_end|>\n", name_of(message.role), message.content);
        break;
      case Role::Assistant:
        add_agent(at, out);
        break;
      case Role::Tool:
        if (at == 0 || messages_[at - 1].role != Role::Tool) out += "<|im_start|>user";
        out += fmt::format("\n<tool_response>\n{}\n</tool_response>", message.content);
        if (at + 1 == messages_.size() || messages_[at + 1].role != Role::Tool) {
          out += "<|im_end|>\n";
        }
    }
  }

 private:
  void add_agent(size_t at, std::string& out) const {
    const Message& message = messages_[at];
    const auto [thought, content] =
        thinks_ ? thought_of(message)
                : std::pair<std::string_view, std::string_view>("", message.content);
    out += "<|im_start|>assistant\n";
    // last_query_ counts the messages up to the last query.
    if (thinks_ && at >= last_query_ && (at + 1 == messages_.size() || !thought.empty())) {
      out += fmt::format("<think>\n{}\n</think>\n\n{}",
                         without_last_lines(without_leading_lines(thought)),
                         without_leading_lines(content));
    } else {
      out += content;
    }
    add_calls(message.calls, out, content.empty());
    out += "<|im_end|>\n";
  }

  std::span<const Message> messages_;
  bool thinks_;
  size_t last_query_ = 0;
};

std::string_view generation_prompt(const ChatFormat format, Thinking thinking) {
  return format == ChatFormat::Qwen3 && thinking == Thinking::Off
             ? "<|im_start|>assistant\n<think>\n\n</think>\n\n"
             : "<|im_start|>assistant\n";
}

}  // namespace

ChatFormat chat_format(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, ChatFormat>, 3> kKnown = {
      {{"qwen3", ChatFormat::Qwen3},
       {"qwen3-2507", ChatFormat::Qwen3Instruct},
       {"compact", ChatFormat::Compact}}};
  std::vector<std::string> names;
  for (const auto& [known, format] : kKnown) {
    if (known == name) return format;
    names.emplace_back(known);
  }
  throw ConfigError(fmt::format("[rl] chat format '{}' is none of qwen3, qwen3-2507, compact{}",
                                name, hint_of(name, names, "; did you mean '", "'?")));
}

ChatFormat chat_format_of_template(std::string_view text) {
  const auto has = [text](std::string_view part) { return text.find(part) != text.npos; };
  // Qwen 2.5's has a system message of its own, Qwen 3.5's writes calls in another form, those with
  // images keep one system message only, and some for training write the reasoning of every turn.
  const bool keeps_reasoning =
      has("ns.last_query_index") && !has("loop.index0 > ns.last_query_index");
  if (has("<|im_start|>") && has("<tool_call>\\n{\"name\": \"") && has("<tool_response>") &&
      !has("You are Qwen") && !has("<function=") && !has("<|image_pad|>") && !keeps_reasoning) {
    if (has("last_query_index") && has("enable_thinking")) return ChatFormat::Qwen3;
    if (!has("<think>")) return ChatFormat::Qwen3Instruct;
  }
  throw ConfigError(
      "[rl] the model's chat_template is not one that is known here: give --chat-format qwen3, "
      "qwen3-2507 or compact if it is meant to be one of them");
}

std::string render(std::span<const Message> messages, std::span<const std::string> tools,
                   const RenderOptions& options) {
  std::string out;
  size_t first = 0;
  if (!tools.empty()) {
    out += "<|im_start|>system\n";
    if (!messages.empty() && messages.front().role == Role::System) {
      out += messages.front().content + "\n\n";
      first = 1;
    }
    out += kToolsBefore;
    for (const auto& tool : tools) out += "\n" + tool;
    out += kToolsAfter;
    out += "<|im_end|>\n";
  }
  const Renderer renderer(messages, options);
  for (size_t i = first; i < messages.size(); ++i) renderer.add(i, out);
  if (options.then == RenderOptions::Then::AgentSpeaks) {
    out += generation_prompt(options.format, options.thinking);
  }
  return out;
}

std::string prompt_text(const Scene& scene, std::span<const Message> first,
                        const ChatOptions& options) {
  const bool is_compact = options.format == ChatFormat::Compact;
  std::vector<Message> messages = {
      {.role = Role::System, .content = is_compact ? scene.task.domain : scene.policy}};
  messages.insert(messages.end(), first.begin(), first.end());
  return render(messages, is_compact ? std::span<const std::string>() : scene.tools,
                {.format = options.format,
                 .thinking = options.thinking,
                 .then = RenderOptions::Then::AgentSpeaks});
}

std::string reply_text(std::span<const Message> seen, const ChatOptions& options) {
  return "\n" + render(seen, {},
                       {.format = options.format,
                        .thinking = options.thinking,
                        .then = RenderOptions::Then::AgentSpeaks});
}

std::string agent_text(const Message& message) {
  std::string text = message.content;
  add_calls(message.calls, text, text.empty());
  return text;
}

std::vector<ChatPiece> pieces_of(const Scene& scene, std::span<const Message> messages,
                                 const ChatOptions& options) {
  std::vector<ChatPiece> pieces;
  std::vector<Message> seen = scene.history;
  for (const auto& message : messages) {
    const bool is_users = message.by == Party::User && message.role == Role::Tool;
    if (message.role == Role::User && !message.calls.empty()) continue;
    if (is_users) continue;  // the agent sees neither the user's calls nor their results
    if (message.role != Role::Assistant) {
      seen.push_back(message);
      continue;
    }
    pieces.push_back(
        {pieces.empty() ? prompt_text(scene, seen, options) : reply_text(seen, options)});
    pieces.push_back({agent_text(message) + std::string(kEnd), true});
    seen.clear();
  }
  if (pieces.empty()) {
    throw DataError(
        fmt::format("[rl] pieces_of: the agent says nothing in {}", name_of(scene.task)));
  }
  return pieces;
}

}  // namespace lockstep::rl
