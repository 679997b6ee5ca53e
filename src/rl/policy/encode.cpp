#include "rl/policy/encode.h"

#include <algorithm>
#include <array>

#include "rl/chat/guard.h"
#include "rl/policy/markers.h"

namespace lockstep::rl {
namespace {

// What chat formats write between texts.
constexpr std::array<std::string_view, 8> kMarkup = {
    "<|im_start|>",    kMessageEnd,        "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<think>",     "</think>"};

}  // namespace

std::vector<int32_t> encode_chat(const text::Tokenizer& tokenizer, std::string_view text) {
  if (text.find(kGuard) == std::string_view::npos) return tokenizer.encode(text);
  std::vector<int32_t> out;
  const auto add = [&](std::string_view part) {
    const auto ids = tokenizer.encode(unguarded(part), {.special = false, .added = false});
    out.insert(out.end(), ids.begin(), ids.end());
  };
  size_t begin = 0;
  for (size_t at = text.find('<'); at != std::string_view::npos; at = text.find('<', at + 1)) {
    const auto rest = text.substr(at);
    const auto markup = std::find_if(kMarkup.begin(), kMarkup.end(),
                                     [&](auto each) { return rest.starts_with(each); });
    if (markup == kMarkup.end()) continue;
    const auto id = tokenizer.id_of(*markup);
    if (!id) continue;
    add(text.substr(begin, at - begin));
    out.push_back(*id);
    begin = at + markup->size();
    at = begin - 1;
  }
  add(text.substr(begin));
  return out;
}

}  // namespace lockstep::rl
