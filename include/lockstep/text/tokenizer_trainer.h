// A tokenizer made from text.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/text/tokenizer.h"

namespace lockstep::text {

// Options of train_tokenizer().
struct TrainerOptions {
  int32_t vocabulary = 8192;  // all tokens: 256 bytes, what is merged, and the added ones
  int64_t min_frequency = 2;  // a pair that is rarer is not merged
  std::string pattern = "";   // as TiktokenOptions has it
  bool nfc = true;
  std::vector<AddedToken> added = {{"<|endoftext|>"}};  // the last numbers
};

// Gives the next piece of text, each cut into words by itself: a document, a line; nothing at the
// end.
using TextSource = std::function<std::optional<std::string>()>;

// Merges the most frequent pair of adjacent tokens within words until there are as many tokens as
// wanted or none is frequent enough; of equally frequent pairs the one with the lowest numbers. The
// same tokens as BpeTrainer of Hugging Face's `tokenizers` with initial_alphabet =
// ByteLevel.alphabet(). Needs memory for the different words of the text, not for all of it. Throws
// ConfigError for an impossible option.
//
// Added tokens in the text are text, as there. One that is a word of its own ("END") is not made by
// merging, however frequent: there it would be, and the added token would have that number, so that
// encode({.special = false}) could give it.
Tokenizer train_tokenizer(const TextSource& source, const TrainerOptions& options = {});

// As above, for texts in memory.
Tokenizer train_tokenizer(const std::vector<std::string_view>& texts,
                          const TrainerOptions& options = {});

}  // namespace lockstep::text

namespace lockstep {
using text::train_tokenizer;
}  // namespace lockstep
