// Rendered conversations as tokens.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "lockstep/text/tokenizer.h"

namespace lockstep::rl {

// tokenizer.encode() of the text without its guards (rl/chat/guard.h), but only what has none is a
// control token.
std::vector<int32_t> encode_chat(const text::Tokenizer& tokenizer, std::string_view text);

}  // namespace lockstep::rl
