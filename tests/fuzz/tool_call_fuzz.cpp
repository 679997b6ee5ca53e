// What a language model writes, whatever it is: it is read or refused, and what was read is written
// so that it is read as the same.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/rl/chat.h"
#include "lockstep/rl/tool_call.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep::rl;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const ToolCallOptions lenient{.mixed = MixedText::Drop, .parallel = ParallelCalls::Allow};
  parse_agent_text(text);
  const auto turn = parse_agent_text(text, lenient);
  if (turn.fault.empty() == (turn.text.empty() && turn.calls.empty())) __builtin_trap();
  for (const auto& call : turn.calls) {
    // A name may hold any text, which the templates write as it is.
    if (call.name.find_first_of("\"\\<") != std::string::npos) continue;
    bool is_plain = call.arguments.find("tool_call>") == std::string::npos &&
                    call.arguments.find("think>") == std::string::npos;
    for (const char c : call.name) is_plain = is_plain && static_cast<unsigned char>(c) >= 0x20;
    if (!is_plain) continue;
    const auto again = parse_agent_text(agent_text({.role = Role::Assistant, .calls = {call}}));
    if (again.calls != std::vector{call}) __builtin_trap();
  }
  return 0;
}
