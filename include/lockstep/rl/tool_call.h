// Calls of tools in what a language model writes, in Qwen3's form:
//
//   <tool_call>
//   {"name": "get_order", "arguments": {"id": "417"}}
//   </tool_call>
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/rl/message.h"

namespace lockstep::rl {

// Text before a call.
enum class MixedText {
  Refuse,  // is malformed: tau2 has no messages with both
  Drop,    // is ignored
};

// Several calls in one message.
enum class ParallelCalls {
  Refuse,  // are malformed
  Allow,   // are executed in their order
};

// Options of parse_agent_text().
struct ToolCallOptions {
  MixedText mixed = MixedText::Refuse;
  ParallelCalls parallel = ParallelCalls::Refuse;
};

// What an agent said: text, or calls, or neither, and then what is wrong.
struct AgentTurn {
  std::string text = "";             // without <think> ... </think>
  std::vector<ToolCall> calls = {};  // without ids; arguments as Python's json.dumps writes them
  std::string fault = "";
};

// Reads a message without its <|im_end|>. Never throws for what it reads. The arguments may be an
// object, or a text that holds one; whole numbers beyond 64 bits are a fault.
AgentTurn parse_agent_text(std::string_view text, const ToolCallOptions& options = {});

}  // namespace lockstep::rl
