#include "text/parts.h"

#include <fmt/format.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/text/utf8.h"
#include "text/unicode.h"

namespace lockstep::text {
namespace {

bool printable(uint32_t byte) {
  return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

struct Symbols {
  Symbols() {
    uint32_t next = 256;
    for (uint32_t b = 0; b < 256; ++b) {
      codes[b] = printable(b) ? b : next++;
      bytes[codes[b]] = static_cast<char>(b);
    }
  }
  std::array<uint32_t, 256> codes;
  std::unordered_map<uint32_t, char> bytes;
};

const Symbols& symbols() {
  static const Symbols all;
  return all;
}

// More would be damage: Qwen's have 151,669, the largest known about a million.
constexpr int32_t kMostIds = 1 << 24;

}  // namespace

uint32_t symbol_of(uint8_t byte) { return symbols().codes[byte]; }

std::optional<std::string> bytes_of_symbols(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const auto [code, bytes] = character_at(text, i);
    const auto found = symbols().bytes.find(code);
    if (found == symbols().bytes.end()) return std::nullopt;
    out.push_back(found->second);
    i += bytes;
  }
  return out;
}

std::string symbols_of_bytes(std::string_view bytes) {
  std::string out;
  for (const char byte : bytes) append_character(out, symbol_of(static_cast<uint8_t>(byte)));
  return out;
}

void AddedTokens::add(const std::string& content, int32_t id, bool special) {
  const auto first = static_cast<uint8_t>(content.front());
  auto& same = by_first_[first];
  if (same.empty()) first_.push_back(content.front());
  const auto shorter = std::find_if(same.begin(), same.end(), [&](uint32_t i) {
    return tokens_[i].content.size() < content.size();
  });
  same.insert(shorter, static_cast<uint32_t>(tokens_.size()));
  tokens_.push_back({content, id, special});
}

AddedTokens::Found AddedTokens::find(std::string_view text, size_t from,
                                     EncodeOptions options) const {
  for (size_t i = text.find_first_of(first_, from); i != text.npos;
       i = text.find_first_of(first_, i)) {
    const auto& same = by_first_[static_cast<uint8_t>(text[i])];
    const auto longest = std::find_if(same.begin(), same.end(), [&](uint32_t token) {
      return text.substr(i).starts_with(tokens_[token].content);
    });
    if (longest == same.end()) {
      ++i;
      continue;
    }
    const auto& [content, id, special] = tokens_[*longest];
    if (special ? options.special : options.added) return {i, content.size(), id};
    i += content.size();
  }
  return {text.size(), 0, -1};
}

Tokenizer::Parts::Parts(Model given, std::string_view where) : model(std::move(given)) {
  const auto place = [&](const std::string& content, int32_t id) {
    if (id < 0 || id >= kMostIds) {
      throw DataError(fmt::format("[text] {}: a token has the number {}; 0 to {} are possible",
                                  where, id, kMostIds - 1));
    }
    if (bytes.size() <= static_cast<size_t>(id)) {
      bytes.resize(static_cast<size_t>(id) + 1);
      known.resize(static_cast<size_t>(id) + 1);
    }
    std::string& here = bytes[static_cast<size_t>(id)];
    if (known[static_cast<size_t>(id)] != 0 && here != content) {
      throw DataError(fmt::format("[text] {}: two tokens have the number {}: '{}' and '{}'", where,
                                  id, valid_utf8(here), valid_utf8(content)));
    }
    here = content;
    known[static_cast<size_t>(id)] = 1;
  };
  for (const auto& [content, id] : model.vocabulary) place(content, id);
  for (const auto& [token, id] : model.added) {
    if (token.content.empty()) {
      throw DataError(fmt::format("[text] {}: the added token {} is empty", where, id));
    }
    if (valid_utf8(token.content) != token.content) {
      throw DataError(fmt::format("[text] {}: the added token '{}' is not UTF-8", where,
                                  valid_utf8(token.content)));
    }
    // One that words have, too, has their bytes, as in `tokenizers`.
    const auto of_words = id < 0 ? 0 : static_cast<size_t>(id);
    if (of_words >= bytes.size() || known[of_words] == 0 ||
        symbols_of_bytes(bytes[of_words]) != token.content) {
      place(token.content, id);
    }
    added[id] = token;
    const bool nfc = token.normalized && model.nfc;
    const std::string content = nfc ? to_nfc(token.content) : token.content;
    (token.normalized ? normalized_ : raw_).add(content, id, token.special);
  }
  for (size_t id = 0; id < bytes.size(); ++id) {
    if (known[id] != 0) ids.emplace(bytes[id], static_cast<int32_t>(id));
  }
  for (const auto& [token, id] : model.added) ids.emplace(token.content, id);
  std::unordered_map<std::string_view, int32_t> of_model;
  for (const auto& [content, id] : model.vocabulary) of_model.emplace(content, id);
  std::array<int32_t, 256> of_byte;
  for (size_t b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    const auto found = of_model.find(std::string_view(&byte, 1));
    if (found == of_model.end()) {
      throw DataError(fmt::format(
          "[text] {}: there is no token for the byte 0x{:02x}: this is not a byte-level BPE "
          "with all 256 bytes",
          where, b));
    }
    of_byte[b] = found->second;
  }
  merges_ = std::make_unique<Merges>(model.merges, of_byte);
  if (!model.whole_words) return;
  whole_words_ = std::move(of_model);
  // They are text here, also where a user has written one.
  for (const auto& [token, id] : model.added) {
    if (bytes[static_cast<size_t>(id)] == token.content) whole_words_.erase(token.content);
  }
}

const std::string& Tokenizer::Parts::bytes_of(int32_t id) const {
  const auto i = static_cast<size_t>(id);
  if (id < 0 || i >= bytes.size() || known[i] == 0) {
    throw DataError(
        fmt::format("[text] decode: {} is not a token; all are below {}", id, bytes.size()));
  }
  return bytes[i];
}

std::unique_ptr<WordCache> Tokenizer::Parts::take_cache() const {
  {
    const std::lock_guard lock(mutex_);
    if (!caches_.empty()) {
      auto cache = std::move(caches_.back());
      caches_.pop_back();
      return cache;
    }
  }
  return std::make_unique<WordCache>();
}

void Tokenizer::Parts::encode(std::string_view text, EncodeOptions options,
                              std::vector<int32_t>& out) const {
  auto cache = take_cache();
  size_t from = 0;
  while (from < text.size()) {
    const auto found = raw_.find(text, from, options);
    const std::string_view before = text.substr(from, found.begin - from);
    if (!model.nfc || !may_change_in_nfc(before)) {
      encode_normalized(before, options, *cache, out);
    } else {
      encode_normalized(to_nfc(before), options, *cache, out);
    }
    if (found.bytes != 0) out.push_back(found.id);
    from = found.begin + found.bytes;
  }
  const std::lock_guard lock(mutex_);
  caches_.push_back(std::move(cache));
}

void Tokenizer::Parts::encode_normalized(std::string_view text, EncodeOptions options,
                                         WordCache& cache, std::vector<int32_t>& out) const {
  if (normalized_.empty()) return encode_words(text, cache, out);
  size_t from = 0;
  while (from < text.size()) {
    const auto found = normalized_.find(text, from, options);
    encode_words(text.substr(from, found.begin - from), cache, out);
    if (found.bytes != 0) out.push_back(found.id);
    from = found.begin + found.bytes;
  }
}

void Tokenizer::Parts::encode_words(std::string_view text, WordCache& cache,
                                    std::vector<int32_t>& out) const {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = word_end(model.pattern, text, begin);
    const std::string_view word = text.substr(begin, end - begin);
    begin = end;
    if (const auto known_ids = cache.find(word)) {
      out.insert(out.end(), known_ids->begin(), known_ids->end());
      continue;
    }
    const size_t first = out.size();
    const auto whole = whole_words_.find(word);
    if (whole != whole_words_.end()) {
      out.push_back(whole->second);
    } else {
      merges_->encode(word, out);
    }
    cache.insert(word, std::span(out).subspan(first));
  }
}

}  // namespace lockstep::text
