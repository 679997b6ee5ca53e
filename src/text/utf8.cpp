#include "lockstep/text/utf8.h"

#include "text/unicode.h"

namespace lockstep::text {

std::string valid_utf8(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const auto [code, bytes] = character_at(text, i);
    append_character(out, code >= kInvalidByte ? 0xFFFD : code);
    i += bytes;
  }
  return out;
}

}  // namespace lockstep::text
