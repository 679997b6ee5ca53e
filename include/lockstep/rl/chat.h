// Conversations as the text that a language model reads. No template is interpreted: the formats
// known here are written out by hand, and others are refused.
//
// What is sampled is never rendered again: an episode's tokens begin with prompt_text(), and each
// message of the agent (its own tokens, up to <|im_end|>) is followed by those of reply_text().
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/rl/environment.h"
#include "lockstep/rl/message.h"

namespace lockstep::rl {

// How conversations look.
enum class ChatFormat {
  Qwen3,          // the chat template of Qwen3-0.6B to 32B
  Qwen3Instruct,  // of Qwen3-Instruct-2507, which does not think
  Compact,        // Qwen3's, but the system message is the domain's name alone
};

// "qwen3", "qwen3-2507" or "compact". Throws ConfigError for another.
ChatFormat chat_format(std::string_view name);

// Which of them a chat_template (Jinja's text) is. Throws ConfigError for one that is not known.
ChatFormat chat_format_of_template(std::string_view text);

// Whether the model may think before it answers; only Qwen3 can.
enum class Thinking {
  Allowed,
  Off,  // an empty thought is written for it (enable_thinking=false)
};

// Options of render().
struct RenderOptions {
  ChatFormat format = ChatFormat::Qwen3;
  Thinking thinking = Thinking::Allowed;
  // Ends with the beginning of the agent's next message (add_generation_prompt=True).
  enum class Then { Nothing, AgentSpeaks } then = Then::Nothing;
};

// What apply_chat_template(messages, tools=tools, tokenize=False) gives, to the byte. `tools`: JSON
// texts as Python's json.dumps writes them. Compact renders as Qwen3Instruct.
std::string render(std::span<const Message> messages, std::span<const std::string> tools,
                   const RenderOptions& options = {});

// The formats for an agent that plays.
struct ChatOptions {
  ChatFormat format = ChatFormat::Compact;
  Thinking thinking = Thinking::Off;
};

// What an episode begins with, up to where the agent writes. `first`: what Episode::begin()
// returned.
std::string prompt_text(const Scene& scene, std::span<const Message> first,
                        const ChatOptions& options = {});

// What stands between the <|im_end|> of an agent's message and where it writes the next. `seen`:
// what Episode::agent_says() returned.
std::string reply_text(std::span<const Message> seen, const ChatOptions& options = {});

// What an agent writes, without <|im_end|>: the inverse of parse_agent_text().
std::string agent_text(const Message& message);

// A part of a conversation.
struct ChatPiece {
  std::string text;
  bool by_agent = false;  // written by the agent: what supervised training learns

  bool operator==(const ChatPiece&) const = default;
};

// A conversation in pieces, alternately not by the agent (the prompt, replies) and by it (a message
// and its <|im_end|>); put together, what an episode's tokens say. `messages`: without
// Scene::history, which is of the prompt. Throws DataError when the agent never speaks.
std::vector<ChatPiece> pieces_of(const Scene& scene, std::span<const Message> messages,
                                 const ChatOptions& options = {});

}  // namespace lockstep::rl
