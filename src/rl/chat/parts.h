// Parts of a message.
#pragma once

#include <string_view>

namespace lockstep::rl {

// What a model writes around its thoughts.
constexpr std::string_view kThink = "<think>", kThought = "</think>";

// A text without the blanks around it.
inline std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r\n";
  const size_t begin = text.find_first_not_of(kBlank);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

}  // namespace lockstep::rl
