// Characters of UTF-8: what they are, and their canonical composition.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::text {

enum class CharacterClass : uint8_t { Other, Letter, Number, Space };

// A byte that is not part of a character stands for itself: kInvalidByte + the byte.
constexpr uint32_t kInvalidByte = 0x110000;

struct Character {
  uint32_t code;
  uint32_t bytes;
};

// What stands at `position` < text.size(). Never reads past the end; overlong forms, surrogates
// and characters that are cut off are invalid bytes.
Character character_at(std::string_view text, size_t position);

// Appends what character_at() reads.
void append_character(std::string& text, uint32_t code);

// For patterns: of any code below kInvalidByte + 256.
CharacterClass class_of(uint32_t code);

// The text in Unicode's normalization form C. Invalid bytes stay.
std::string to_nfc(std::string_view text);

// Whether to_nfc() may change the text; false only when it does not.
bool may_change_in_nfc(std::string_view text);

}  // namespace lockstep::text
