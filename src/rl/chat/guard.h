// What users and tools have written, marked within a rendered conversation so that it gives no
// control tokens: a message must not be able to end itself with "<|im_end|>".
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/rl/message.h"

namespace lockstep::rl {

// After each '<' of theirs. No UTF-8 has this byte.
inline constexpr char kGuard = '\xF8';

inline std::string guarded(std::string_view text) {
  std::string out;
  for (const char c : text) {
    out += c;
    if (c == '<') out += kGuard;
  }
  return out;
}

inline std::string unguarded(std::string_view text) {
  std::string out(text);
  std::erase(out, kGuard);
  return out;
}

inline std::vector<Message> guarded(std::span<const Message> messages) {
  std::vector<Message> out(messages.begin(), messages.end());
  for (auto& message : out) {
    if (message.role == Role::User || message.role == Role::Tool) {
      message.content = guarded(message.content);
    }
  }
  return out;
}

}  // namespace lockstep::rl
