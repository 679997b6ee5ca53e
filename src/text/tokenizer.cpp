#include "lockstep/text/tokenizer.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "text/files.h"
#include "text/parts.h"
#include "text/unicode.h"

namespace lockstep::text {

Tokenizer Tokenizer::from_file(const std::string& path) {
  std::error_code none;  // read_file() says better what is wrong with a path
  if (std::filesystem::is_directory(path, none)) return from_file(path + "/tokenizer.json");
  if (path.ends_with(".tiktoken")) return from_tiktoken(path);
  return from_json(read_file(path), path);
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, EncodeOptions options) const {
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 4 + 8);
  parts_->encode(text, options, ids);
  return ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, DecodeOptions options) const {
  std::string text;
  for (const int32_t id : ids) {
    const std::string& bytes = parts_->bytes_of(id);
    if (options.special || !is_special(id)) text += bytes;
  }
  return text;
}

int32_t Tokenizer::size() const { return static_cast<int32_t>(parts_->bytes.size()); }

std::optional<int32_t> Tokenizer::id_of(std::string_view bytes) const {
  const auto found = parts_->ids.find(bytes);
  if (found == parts_->ids.end()) return std::nullopt;
  return found->second;
}

std::string_view Tokenizer::bytes_of(int32_t id) const { return parts_->bytes_of(id); }

bool Tokenizer::is_special(int32_t id) const {
  const auto found = parts_->added.find(id);
  return found != parts_->added.end() && found->second.special;
}

std::map<int32_t, AddedToken> Tokenizer::added_tokens() const {
  return {parts_->added.begin(), parts_->added.end()};
}

void Tokenizer::save(const std::string& path) const { write_file(path, to_json()); }

namespace {

// How many bytes at the end may be the beginning of a character that is not complete yet.
size_t incomplete(std::string_view text) {
  for (size_t back = 1; back <= 3 && back <= text.size(); ++back) {
    const auto byte = static_cast<uint8_t>(text[text.size() - back]);
    if ((byte & 0xC0) == 0x80) continue;  // not the first of a character
    const size_t bytes = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC2 ? 2 : 1;
    if (byte > 0xF4 || bytes <= back) return 0;
    // The second byte of some characters is limited: what cannot become one is not waited for.
    if (back >= 2) {
      const auto second = static_cast<uint8_t>(text[text.size() - back + 1]);
      if ((byte == 0xE0 && second < 0xA0) || (byte == 0xED && second > 0x9F) ||
          (byte == 0xF0 && second < 0x90) || (byte == 0xF4 && second > 0x8F)) {
        return 0;
      }
    }
    return back;
  }
  return 0;
}

}  // namespace

std::string TextStream::add(int32_t id) {
  const std::string_view bytes = tokenizer_.bytes_of(id);
  if (options_.special || !tokenizer_.is_special(id)) pending_ += bytes;
  const size_t rest = incomplete(pending_);
  std::string complete = pending_.substr(0, pending_.size() - rest);
  pending_.erase(0, complete.size());
  return complete;
}

std::string TextStream::finish() { return std::exchange(pending_, {}); }

}  // namespace lockstep::text
