#include "text/pattern.h"

#include <cstdint>

#include "text/unicode.h"

namespace lockstep::text {
namespace {

using enum CharacterClass;

// A position in the text and what stands there.
class Cursor {
 public:
  Cursor(std::string_view text, size_t position) : text_(text), position_(position) { look(); }

  bool at_end() const { return position_ >= text_.size(); }
  size_t position() const { return position_; }
  uint32_t code() const { return here_.code; }  // 0 at the end, which is not an end by itself
  bool is(CharacterClass kind) const { return !at_end() && kind_ == kind; }
  bool is_line_end() const { return !at_end() && (here_.code == '\r' || here_.code == '\n'); }

  void advance() {
    position_ += here_.bytes;
    look();
  }
  Cursor next() const {
    Cursor other = *this;
    other.advance();
    return other;
  }

 private:
  void look() {
    if (at_end()) {
      here_ = {0, 0};
      return;
    }
    here_ = character_at(text_, position_);
    kind_ = class_of(here_.code);
  }

  std::string_view text_;
  size_t position_;
  Character here_{0, 0};
  CharacterClass kind_ = Other;
};

// Without regard to case: the long s (U+017F) is an s.
uint32_t folded(uint32_t code) {
  if (code >= 'A' && code <= 'Z') return code + 32;
  return code == 0x17F ? 's' : code;
}

// After 's, 't, 're, 've, 'm, 'll, 'd, or at `apostrophe` when none stands there.
Cursor behind_contraction(Cursor apostrophe, bool fold) {
  const auto letter = [fold](const Cursor& c) { return fold ? folded(c.code()) : c.code(); };
  const Cursor first = apostrophe.next();
  const uint32_t a = letter(first);
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return first.next();
  if (a == 'r' || a == 'v' || a == 'l') {
    const Cursor second = first.next();
    if (letter(second) == (a == 'l' ? 'l' : 'e')) return second.next();
  }
  return apostrophe;
}

void skip(Cursor& at, CharacterClass kind) {
  while (at.is(kind)) at.advance();
}

// \s+(?!\S)|\s+ from white space on: all of it, but for the last character when a word follows.
size_t spaces_end(Cursor at) {
  const size_t begin = at.position();
  size_t last = begin;
  while (at.is(Space)) {
    last = at.position();
    at.advance();
  }
  return at.at_end() || last == begin ? at.position() : last;
}

size_t gpt2_end(Cursor at) {
  if (at.code() == '\'' && !at.at_end()) {
    const Cursor behind = behind_contraction(at, false);
    if (behind.position() != at.position()) return behind.position();
  }
  Cursor from = at;
  if (at.code() == ' ') from.advance();
  for (const auto kind : {Letter, Number, Other}) {
    if (from.is(kind)) {
      skip(from, kind);
      return from.position();
    }
  }
  return spaces_end(at);
}

size_t qwen_end(Cursor at, int most_digits) {
  if (at.is(Letter)) {
    skip(at, Letter);
    return at.position();
  }
  if (at.is(Number)) {
    for (int i = 0; i < most_digits && at.is(Number); ++i) at.advance();
    return at.position();
  }
  if (at.code() == '\'') {
    const Cursor behind = behind_contraction(at, true);
    if (behind.position() != at.position()) return behind.position();
  }
  Cursor from = at.next();
  if (!at.is_line_end() && from.is(Letter)) {
    skip(from, Letter);
    return from.position();
  }
  if (at.is(Other) || (at.code() == ' ' && from.is(Other))) {
    skip(from, Other);
    while (from.is_line_end()) from.advance();
    return from.position();
  }
  // White space: up to the last line end among it, if there is any.
  size_t behind_lines = 0;
  for (from = at; from.is(Space);) {
    const bool line_end = from.is_line_end();
    from.advance();
    if (line_end) behind_lines = from.position();
  }
  return behind_lines != 0 ? behind_lines : spaces_end(at);
}

size_t words_end(Cursor at) {
  const auto is_mark = [](const Cursor& c) {
    return c.code() == '.' || c.code() == ',' || c.code() == '?' || c.code() == '!';
  };
  const auto is_within = [&](const Cursor& c) {
    return !c.at_end() && !c.is(Space) && !c.is(Number) && !is_mark(c);
  };
  if (at.is(Number) || is_mark(at)) return at.next().position();
  Cursor from = at.code() == ' ' ? at.next() : at;
  if (!is_within(from)) {
    skip(at, Space);
    return at.position();
  }
  while (is_within(from)) from.advance();
  return from.position();
}

}  // namespace

std::optional<Pattern> pattern_of(std::string_view expression) {
  for (const auto pattern : {Pattern::Qwen, Pattern::Digits, Pattern::Gpt2, Pattern::Words}) {
    if (expression == expression_of(pattern)) return pattern;
  }
  return std::nullopt;
}

std::string_view expression_of(Pattern pattern) {
  if (pattern == Pattern::Gpt2) return kGpt2Pattern;
  if (pattern == Pattern::Words) return kWordsPattern;
  return pattern == Pattern::Digits ? kDigitsPattern : kQwenPattern;
}

size_t word_end(Pattern pattern, std::string_view text, size_t begin) {
  const Cursor at(text, begin);
  if (pattern == Pattern::Gpt2) return gpt2_end(at);
  if (pattern == Pattern::Words) return words_end(at);
  return qwen_end(at, pattern == Pattern::Digits ? 3 : 1);
}

}  // namespace lockstep::text
