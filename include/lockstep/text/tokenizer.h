// Text into the numbers that a language model reads, and back: byte-level BPE as Hugging Face's
// `tokenizers` and OpenAI's `tiktoken` have it, with their files and the same numbers.
//
//   auto tokenizer = lockstep::Tokenizer::from_file("qwen/tokenizer.json");
//   std::vector<int32_t> ids = tokenizer.encode("Hello, world!");
//   std::string text = tokenizer.decode(ids);
//
// Sennrich, Haddow, Birch: Neural machine translation of rare words with subword units, 2016;
// Radford et al.: Language models are unsupervised multitask learners, 2019 (bytes as symbols).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/compiler.h"

namespace lockstep::text {

// A token that stands in the text as it is: "<|im_end|>". Words have it, too, where a
// tokenizer.json makes it of them: one of the content "\u0120the" is found as such and as the bytes
// " the".
struct AddedToken {
  std::string content;
  // decode() can leave such tokens out. Qwen's "<think>" is added, but not special.
  bool special = true;
  // Whether it is looked for after the normalisation of the text.
  bool normalized = false;

  bool operator==(const AddedToken&) const = default;
};

// Options of from_tiktoken(): what a file of ranks does not say.
struct TiktokenOptions {
  // The regular expression that cuts text into words: Qwen's when empty. GPT-2's, and the one of
  // GPT-4 and Llama 3 (with \p{N}{1,3}), are known, too; others are refused.
  std::string pattern = "";
  bool nfc = true;  // as the tokenizer.json of Qwen has it; tiktoken itself does not normalise
  // After the ranks, in this order. Nothing: those of Qwen 3 (qwen3_added_tokens()).
  std::optional<std::vector<AddedToken>> added = std::nullopt;
};

// The 26 tokens of Qwen 3 after its 151,643 ranks, from "<|endoftext|>" to "</think>".
std::vector<AddedToken> qwen3_added_tokens();

// Options of encode().
struct EncodeOptions {
  // False: special tokens in the text are text. For what users write: a message must not be able to
  // end itself with "<|im_end|>".
  bool special = true;
  // False: other added tokens in the text, such as Qwen's "<tool_response>", are text, too.
  bool added = true;
};

// Options of decode().
struct DecodeOptions {
  bool special = true;  // false: leaves special tokens out
};

// A handle: copies are the same tokenizer. Any thread may call it.
class Tokenizer {
 public:
  // A tokenizer.json, a folder that has one, or a .tiktoken file as Qwen's. Throws DataError for
  // what cannot be read, is malformed, or is another kind of tokenizer, which is named.
  static Tokenizer from_file(const std::string& path);

  // The text of a tokenizer.json; `where` begins the messages.
  static Tokenizer from_json(std::string_view json, std::string_view where = "tokenizer.json");

  // Lines of a token in base64 and its rank.
  static Tokenizer from_tiktoken(const std::string& path, const TiktokenOptions& options = {});

  // The text's tokens. Nothing is put before, after or between them (add_special_tokens=False in
  // Hugging Face's words). Bytes that are not UTF-8 are tokens, too, and come back as they are.
  std::vector<int32_t> encode(std::string_view text, EncodeOptions options = {}) const;

  // The bytes of the tokens: of encode(text), what normalisation made of the text. Throws DataError
  // for a number that is not a token.
  std::string decode(std::span<const int32_t> ids, DecodeOptions options = {}) const;

  // All numbers are below it. A model's embedding may have more rows (Qwen's has).
  int32_t size() const;

  // The token of these bytes, "<|im_end|>" or " the"; nothing when there is none.
  std::optional<int32_t> id_of(std::string_view bytes) const;

  // A token's bytes, of which several may make one character. Throws DataError as decode().
  std::string_view bytes_of(int32_t id) const;

  // Whether decode() may leave it out.
  bool is_special(int32_t id) const;

  // Added tokens by number.
  std::map<int32_t, AddedToken> added_tokens() const;

  // The text of a tokenizer.json, which Hugging Face's libraries read. Throws DataError for an
  // added token whose text is that of another token there, where characters stand for bytes.
  std::string to_json() const;

  // Writes it to `path`, which is whole or as before. Throws DataError.
  void save(const std::string& path) const;

  // What it is made of, which this library alone can make.
  struct Parts;
  // A tokenizer of these.
  explicit Tokenizer(std::shared_ptr<const Parts> parts) : parts_(std::move(parts)) {}

 private:
  std::shared_ptr<const Parts> parts_;
};

// Text while it is generated: each call gives the characters that have become complete, never a
// part of one. What all calls and finish() return, put together, is what decode() returns.
class TextStream {
 public:
  // Keeps the tokenizer.
  explicit TextStream(Tokenizer tokenizer, DecodeOptions options = {})
      : tokenizer_(std::move(tokenizer)), options_(options) {}

  // Throws DataError as decode(), and then nothing has changed.
  std::string add(int32_t id);

  // The bytes of a character that was never completed, if any; the stream begins again.
  std::string finish();

 private:
  Tokenizer tokenizer_;
  DecodeOptions options_;
  std::string pending_;
};

}  // namespace lockstep::text

namespace lockstep {
using text::TextStream;
using text::Tokenizer;
}  // namespace lockstep
