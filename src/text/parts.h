// The parts of a Tokenizer.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/text/tokenizer.h"
#include "text/merges.h"
#include "text/pattern.h"
#include "text/word_cache.h"

namespace lockstep::text {

// Added tokens by their first byte, the longest first.
class AddedTokens {
 public:
  void add(const std::string& content, int32_t id, bool special);
  bool empty() const { return tokens_.empty(); }

  struct Found {
    size_t begin, bytes;
    int32_t id;
  };
  // The first one at `from` or after that the options look for; `bytes` is 0 when there is none.
  // One that they do not is text as a whole, also where another one stands in it.
  Found find(std::string_view text, size_t from, EncodeOptions options) const;

 private:
  struct Token {
    std::string content;
    int32_t id;
    bool special;
  };
  std::vector<Token> tokens_;
  std::array<std::vector<uint32_t>, 256> by_first_;  // indices into tokens_
  std::string first_;                                // the bytes they begin with
};

struct Tokenizer::Parts {
  // `vocabulary` has bytes and id of each token of the model, `merges` pairs of it.
  struct Model {
    std::vector<std::pair<std::string, int32_t>> vocabulary;
    std::vector<Merge> merges;
    bool whole_words = false;  // a word that is a token is not merged: ignore_merges there
    Pattern pattern = Pattern::Qwen;
    bool nfc = false;
    std::vector<std::pair<AddedToken, int32_t>> added;
    // Parts of a tokenizer.json that do not change ids, as they were read: JSON.
    std::string post_processor = "null", truncation = "null", padding = "null";
  };
  // Throws DataError that begins with `where` when bytes or parts of merges are missing.
  Parts(Model model, std::string_view where);

  void encode(std::string_view text, EncodeOptions options, std::vector<int32_t>& ids) const;
  const std::string& bytes_of(int32_t id) const;

  Model model;
  std::vector<std::string> bytes;  // by id; of an added token its content
  std::vector<char> known;         // by id
  std::unordered_map<std::string_view, int32_t> ids;
  std::unordered_map<int32_t, AddedToken> added;

 private:
  void encode_normalized(std::string_view text, EncodeOptions options, WordCache& cache,
                         std::vector<int32_t>& ids) const;
  void encode_words(std::string_view text, WordCache& cache, std::vector<int32_t>& ids) const;
  std::unique_ptr<WordCache> take_cache() const;

  std::unique_ptr<Merges> merges_;
  std::unordered_map<std::string_view, int32_t> whole_words_;  // those that are not merged
  AddedTokens raw_, normalized_;  // those of the text before and after normalisation
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<WordCache>> caches_;  // that no call uses
};

// The characters that stand for bytes in a tokenizer.json: printable bytes for themselves, the
// others for the characters from U+0100 on (Radford et al. 2019). Of text, nothing when a character
// stands for no byte.
std::optional<std::string> bytes_of_symbols(std::string_view symbols);
std::string symbols_of_bytes(std::string_view bytes);
// The code of the character that stands for a byte.
uint32_t symbol_of(uint8_t byte);

}  // namespace lockstep::text
