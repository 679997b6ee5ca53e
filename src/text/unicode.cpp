#include "text/unicode.h"

#include <cstring>
#include <memory>
#include <span>

#include "text/composition.h"
#include "text/unicode_classes.inl"

namespace lockstep::text {
namespace {

constexpr uint8_t kClass = 3;
constexpr uint8_t kUnstable = 4;  // NFC may change it, or what stands beside it

// One byte per character: memory pages that are never read are never loaded.
struct Properties {
  Properties() : of(new uint8_t[kInvalidByte + 256]()) {
    const auto fill = [this](std::span<const uint32_t> ranges, CharacterClass value) {
      for (size_t i = 0; i < ranges.size(); i += 2) {
        std::memset(&of[ranges[i]], static_cast<int>(value), ranges[i + 1] - ranges[i]);
      }
    };
    fill(kLetters, CharacterClass::Letter);
    fill(kNumbers, CharacterClass::Number);
    fill(kSpaces, CharacterClass::Space);
    for_each_unstable([this](uint32_t code) { of[code] |= kUnstable; });
  }
  std::unique_ptr<uint8_t[]> of;
};

const uint8_t* properties() {
  static const Properties all;
  return all.of.get();
}

bool is_ascii(std::string_view text, size_t position) {
  uint64_t eight;
  std::memcpy(&eight, text.data() + position, 8);
  return (eight & 0x8080808080808080ULL) == 0;
}

}  // namespace

Character character_at(std::string_view text, size_t position) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[position + i]); };
  const uint32_t first = byte(0);
  if (first < 0x80) return {first, 1};
  const size_t left = text.size() - position;
  const auto next = [&](size_t i) -> uint32_t { return byte(i) & 0x3F; };
  const auto continues = [&](size_t i) { return (byte(i) & 0xC0) == 0x80; };
  if (first >= 0xC2 && first < 0xE0 && left >= 2 && continues(1)) {
    return {(first & 0x1F) << 6 | next(1), 2};
  }
  if (first >= 0xE0 && first < 0xF0 && left >= 3 && continues(1) && continues(2)) {
    const uint32_t code = (first & 0x0F) << 12 | next(1) << 6 | next(2);
    if (code >= 0x800 && (code < 0xD800 || code >= 0xE000)) return {code, 3};
  }
  if (first >= 0xF0 && first < 0xF5 && left >= 4 && continues(1) && continues(2) && continues(3)) {
    const uint32_t code = (first & 0x07) << 18 | next(1) << 12 | next(2) << 6 | next(3);
    if (code >= 0x10000 && code < 0x110000) return {code, 4};
  }
  return {kInvalidByte + first, 1};
}

void append_character(std::string& text, uint32_t code) {
  const auto put = [&text](uint32_t byte) { text.push_back(static_cast<char>(byte)); };
  if (code >= kInvalidByte) {
    put(code - kInvalidByte);
  } else if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | code >> 6);
    put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | code >> 12);
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | code >> 18);
    put(0x80 | (code >> 12 & 0x3F));
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  }
}

CharacterClass class_of(uint32_t code) {
  return static_cast<CharacterClass>(properties()[code] & kClass);
}

bool may_change_in_nfc(std::string_view text) {
  const uint8_t* of = properties();
  for (size_t i = 0; i < text.size();) {
    if (text.size() - i >= 8 && is_ascii(text, i)) {
      i += 8;
      continue;
    }
    const auto [code, bytes] = character_at(text, i);
    if ((of[code] & kUnstable) != 0) return true;
    i += bytes;
  }
  return false;
}

std::string to_nfc(std::string_view text) {
  const uint8_t* of = properties();
  std::string out;
  out.reserve(text.size());
  std::vector<uint32_t> pending;  // from a stable character to the next
  bool changes = false;
  size_t begin = 0;  // of `pending`
  const auto flush = [&](size_t end) {
    if (changes) {
      for (const uint32_t code : composed(pending)) append_character(out, code);
    } else {
      out.append(text, begin, end - begin);
    }
    pending.clear();
    changes = false;
    begin = end;
  };
  for (size_t i = 0; i < text.size();) {
    const auto [code, bytes] = character_at(text, i);
    const bool unstable = (of[code] & kUnstable) != 0;
    if (!unstable) flush(i);
    pending.push_back(code);
    changes |= unstable;
    i += bytes;
  }
  flush(text.size());
  return out;
}

}  // namespace lockstep::text
