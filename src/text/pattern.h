// How a text is cut into words before pairs of tokens are merged within each.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

namespace lockstep::text {

// The patterns that are known. Regular expressions of this kind go through a text character by
// character; these are written out as code, which is several times faster.
enum class Pattern {
  Qwen,    // one digit a word: Qwen 2, 2.5, 3
  Digits,  // up to three digits: GPT-4, Llama 3
  Gpt2,    // as ByteLevel has it with use_regex
  Words,   // one digit or punctuation mark a word; other adjacent characters stay together
};

constexpr std::string_view kQwenPattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kDigitsPattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

constexpr std::string_view kWordsPattern = R"(\p{N}|[.,?!]| ?[^\s\p{N}.,?!]+|\s+)";

// The one of this regular expression; nothing for another.
std::optional<Pattern> pattern_of(std::string_view expression);

// The regular expression of it.
std::string_view expression_of(Pattern pattern);

// Where the word that begins at `begin` < text.size() ends.
size_t word_end(Pattern pattern, std::string_view text, size_t begin);

}  // namespace lockstep::text
