// Files of ranks, as `tiktoken` reads them and Qwen is published with.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "core/number.h"
#include "lockstep/core/error.h"
#include "lockstep/text/tokenizer.h"
#include "text/files.h"
#include "text/parts.h"

namespace lockstep::text {
namespace {

// Of 4 characters 3 bytes; nothing for what is not base64 with padding.
std::optional<std::string> from_base64(std::string_view text) {
  if (text.size() % 4 != 0) return std::nullopt;
  std::string out;
  uint32_t bits = 0;
  size_t padding = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    constexpr std::string_view kDigits =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    size_t digit = kDigits.find(text[i]);
    if (text[i] == '=' && i + 2 >= text.size()) {
      digit = 0;
      ++padding;
    } else if (digit == kDigits.npos || padding != 0) {
      return std::nullopt;
    }
    bits = bits << 6 | static_cast<uint32_t>(digit);
    if (i % 4 == 3) {
      for (const int shift : {16, 8, 0}) out.push_back(static_cast<char>(bits >> shift));
      bits = 0;
    }
  }
  out.resize(out.size() - padding);
  return out;
}

// A token has one merge at most: its bytes, with all merges of lower ranks done, are two parts.
class Derivation {
 public:
  explicit Derivation(const std::unordered_map<std::string_view, int32_t>& ranks) : ranks_(ranks) {}

  // The ranks of the two parts; nothing when there are more, so that merging never makes it.
  std::optional<std::pair<int32_t, int32_t>> of(std::string_view token, int32_t rank) const {
    std::vector<size_t> bounds(token.size() + 1);  // where parts begin, and the end
    for (size_t i = 0; i <= token.size(); ++i) bounds[i] = i;
    while (bounds.size() > 3) {
      int32_t best = rank;
      size_t where = 0;
      for (size_t i = 0; i + 2 < bounds.size(); ++i) {
        const auto found = ranks_.find(token.substr(bounds[i], bounds[i + 2] - bounds[i]));
        if (found != ranks_.end() && found->second < best) {
          best = found->second;
          where = i + 1;
        }
      }
      if (where == 0) return std::nullopt;
      bounds.erase(bounds.begin() + static_cast<long>(where));
    }
    const auto left = ranks_.find(token.substr(0, bounds[1]));
    const auto right = ranks_.find(token.substr(bounds[1]));
    if (left == ranks_.end() || right == ranks_.end()) return std::nullopt;
    return std::pair(left->second, right->second);
  }

 private:
  const std::unordered_map<std::string_view, int32_t>& ranks_;
};

std::vector<std::pair<std::string, int32_t>> read_ranks(const std::string& path) {
  const std::string file = read_file(path);
  std::vector<std::pair<std::string, int32_t>> out;
  size_t number = 0;
  for (size_t begin = 0; begin < file.size();) {
    const size_t end = std::min(file.find('\n', begin), file.size());
    std::string_view line = std::string_view(file).substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    const size_t space = std::min(line.find(' '), line.size());
    auto bytes = from_base64(line.substr(0, space));
    const auto rank = whole_number_from<int32_t>(line.substr(std::min(space + 1, line.size())));
    if (!bytes || bytes->empty() || !rank || *rank < 0) {
      throw DataError(
          fmt::format("[text] {}: line {} is not a token in base64 and its rank", path, number));
    }
    out.emplace_back(std::move(*bytes), *rank);
  }
  return out;
}

}  // namespace

std::vector<AddedToken> qwen3_added_tokens() {
  constexpr std::array kSpecial = {"<|endoftext|>",        "<|im_start|>",       "<|im_end|>",
                                   "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
                                   "<|box_end|>",          "<|quad_start|>",     "<|quad_end|>",
                                   "<|vision_start|>",     "<|vision_end|>",     "<|vision_pad|>",
                                   "<|image_pad|>",        "<|video_pad|>"};
  constexpr std::array kOther = {"<tool_call>",      "</tool_call>",   "<|fim_prefix|>",
                                 "<|fim_middle|>",   "<|fim_suffix|>", "<|fim_pad|>",
                                 "<|repo_name|>",    "<|file_sep|>",   "<tool_response>",
                                 "</tool_response>", "<think>",        "</think>"};
  std::vector<AddedToken> out;
  for (const char* content : kSpecial) out.push_back({content});
  for (const char* content : kOther) out.push_back({content, false});
  return out;
}

Tokenizer Tokenizer::from_tiktoken(const std::string& path, const TiktokenOptions& options) {
  Parts::Model model;
  const auto pattern = options.pattern.empty() ? Pattern::Qwen : pattern_of(options.pattern);
  if (!pattern) {
    throw DataError(fmt::format(
        "[text] {}: the pattern '{}' is not known; those of Qwen, GPT-2, GPT-4 and Llama 3 are",
        path, options.pattern));
  }
  model.pattern = *pattern;
  model.nfc = options.nfc;
  model.vocabulary = read_ranks(path);
  auto& tokens = model.vocabulary;
  std::sort(tokens.begin(), tokens.end(),
            [](const auto& a, const auto& b) { return a.second < b.second; });
  std::unordered_map<std::string_view, int32_t> ranks;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if ((i > 0 && tokens[i].second == tokens[i - 1].second) ||
        !ranks.emplace(tokens[i].first, tokens[i].second).second) {
      throw DataError(fmt::format("[text] {}: the rank {} or its token is there twice", path,
                                  tokens[i].second));
    }
  }
  const Derivation derivation(ranks);
  for (const auto& [bytes, rank] : tokens) {
    if (bytes.size() == 1) continue;
    if (const auto parts = derivation.of(bytes, rank)) {
      model.merges.push_back({parts->first, parts->second, rank});
    } else {
      model.whole_words = true;  // it can only be a whole word, which tiktoken looks up first
    }
  }
  int32_t next = tokens.empty() ? 0 : tokens.back().second + 1;
  for (auto& token : options.added.value_or(qwen3_added_tokens()))
    model.added.emplace_back(token, next++);
  return Tokenizer(std::make_shared<const Parts>(std::move(model), path));
}

}  // namespace lockstep::text
