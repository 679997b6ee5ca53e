// Token files: a corpus as numbers, ready to be trained on. docs/transformer.md has the format.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/compiler.h"

namespace lockstep::text {

// How a token is stored, in little-endian order.
enum class TokenType { Uint16, Uint32, Int32, Int64 };

// The one of this name: "uint16", "uint32", "int32", "int64". Throws ConfigError for others.
TokenType token_type(std::string_view name);
// Its name, and its bytes.
std::string_view name_of(TokenType type);
int64_t bytes_of(TokenType type);

// Options of a TokenWriter.
struct TokenWriterOptions {
  int64_t vocabulary = 0;              // tokens are below it: uint16 up to 65,536, else uint32
  int32_t separator = 0;               // written after each document
  int64_t shard_tokens = 100'000'000;  // a document stays in one file, which may be larger by it
};

// Writes a folder of token files. tokens.json comes last: without it there is no folder of tokens.
class TokenWriter {
 public:
  // Makes the folder; a relative one is of the working directory of now. Throws ConfigError for a
  // separator outside the vocabulary or a folder that has a tokens.json, DataError when it cannot
  // be made.
  TokenWriter(const std::string& folder, const TokenWriterOptions& options);
  ~TokenWriter();
  TokenWriter(const TokenWriter&) = delete;
  TokenWriter& operator=(const TokenWriter&) = delete;

  // A document, without its separator. Throws DataError for a token outside the vocabulary, and
  // when it cannot be written.
  void add(std::span<const int32_t> document);

  // All files are whole and on the disk, and so is tokens.json. Returns the tokens, separators too.
  int64_t finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Token files that are mapped into memory: pages are read when they are looked at.
class TokenFiles {
 public:
  // A folder that TokenWriter wrote, or one file of nothing but tokens of `type`, as other programs
  // write them. Throws DataError that names the file for what is missing, malformed, or has another
  // size than tokens.json says.
  static TokenFiles open(const std::string& path, TokenType type = TokenType::Uint16);

  // Files, and the tokens of each.
  size_t shards() const { return shards_.size(); }
  int64_t tokens(size_t shard) const { return shards_.at(shard).tokens; }
  int64_t tokens() const;

  // Copies the tokens from `begin` on. Throws DataError that names file and place for one that is
  // not below the vocabulary.
  void read(size_t shard, int64_t begin, std::span<int64_t> to) const;

  // What tokens.json says; nothing of a single file.
  std::optional<int64_t> vocabulary() const { return vocabulary_; }
  std::optional<int64_t> separator() const { return separator_; }

 private:
  struct Shard {
    std::string path;
    std::shared_ptr<const void> bytes;
    int64_t tokens;
  };
  void add(const std::string& path, std::optional<int64_t> tokens);

  TokenType type_ = TokenType::Uint16;
  std::vector<Shard> shards_;
  std::optional<int64_t> vocabulary_, separator_;
};

}  // namespace lockstep::text
