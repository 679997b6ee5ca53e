#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <queue>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/counted.h"
#include "lockstep/core/error.h"
#include "lockstep/text/tokenizer_trainer.h"
#include "lockstep/text/utf8.h"
#include "text/parts.h"
#include "text/unicode.h"

namespace lockstep::text {
namespace {

struct Word {
  std::vector<int32_t> ids;
  int64_t count;
};

using Pair = std::pair<int32_t, int32_t>;
struct PairHash {
  size_t operator()(const Pair& pair) const {
    const uint64_t both =
        static_cast<uint64_t>(pair.first) << 32 | static_cast<uint32_t>(pair.second);
    return both * 0x9E3779B97F4A7C15ULL >> 7;
  }
};

struct Candidate {
  int64_t count;
  Pair pair;
  bool operator<(const Candidate& other) const {
    return count != other.count ? count < other.count : pair > other.pair;
  }
};

using Contents = std::unordered_set<std::string>;

// What added tokens look like in a word. Throws ConfigError for those that would not be a token of
// their own.
Contents contents_of(const std::vector<AddedToken>& added, bool nfc) {
  Contents contents;
  for (const auto& token : added) {
    if (token.content.size() < 2) {
      throw ConfigError(fmt::format(
          "[text] train_tokenizer: the added token '{}' is {}; give two bytes at least",
          token.content, token.content.empty() ? "empty" : "a byte, which is a token already"));
    }
    if (valid_utf8(token.content) != token.content) {
      throw ConfigError(fmt::format("[text] train_tokenizer: the added token '{}' is not UTF-8",
                                    valid_utf8(token.content)));
    }
    if (!contents.insert(token.content).second) {
      throw ConfigError(
          fmt::format("[text] train_tokenizer: the added token '{}' comes twice", token.content));
    }
  }
  for (const auto& token : added) {
    if (nfc) contents.insert(to_nfc(token.content));
  }
  return contents;
}

class Training {
 public:
  // `added` are never made by merging.
  Training(const std::array<int32_t, 256>& bytes, Contents added)
      : bytes_(bytes), added_(std::move(added)) {}

  void add(std::string_view word, int64_t count) {
    Word entry{{}, count};
    for (const char byte : word) entry.ids.push_back(bytes_[static_cast<uint8_t>(byte)]);
    if (entry.ids.size() < 2) return;
    const auto index = static_cast<uint32_t>(words_.size());
    for (size_t i = 0; i + 1 < entry.ids.size(); ++i) {
      change({entry.ids[i], entry.ids[i + 1]}, count, index);
    }
    words_.push_back(std::move(entry));
  }

  // Merges until `vocabulary` has `size` tokens.
  void run(Tokenizer::Parts::Model& model, size_t size, int64_t min_frequency) {
    std::unordered_map<std::string, int32_t> known(model.vocabulary.begin(),
                                                   model.vocabulary.end());
    for (const auto& [pair, use] : uses_) candidates_.push({use.count, pair});
    while (model.vocabulary.size() < size && !candidates_.empty()) {
      const auto [count, pair] = candidates_.top();
      candidates_.pop();
      const int64_t now = uses_[pair].count;
      if (now != count) {  // it has changed since
        if (now > 0) candidates_.push({now, pair});
        continue;
      }
      if (count < std::max<int64_t>(min_frequency, 1)) break;
      const auto bytes_of = [&](int32_t id) {
        return model.vocabulary[static_cast<size_t>(id)].first;
      };
      std::string bytes = bytes_of(pair.first) + bytes_of(pair.second);
      if (added_.contains(bytes)) {
        uses_.erase(pair);
        continue;
      }
      // Other parts may have made the same bytes before.
      const auto [found, is_new] =
          known.emplace(bytes, static_cast<int32_t>(model.vocabulary.size()));
      if (is_new) model.vocabulary.emplace_back(std::move(bytes), found->second);
      model.merges.push_back({pair.first, pair.second, found->second});
      merge(pair, found->second);
    }
  }

 private:
  struct Use {
    int64_t count = 0;
    std::vector<uint32_t> words;  // that have, or had, the pair
  };

  void change(Pair pair, int64_t by, uint32_t word) {
    Use& use = uses_[pair];
    use.count += by;
    if (by > 0 && (use.words.empty() || use.words.back() != word)) use.words.push_back(word);
  }

  void merge(Pair pair, int32_t whole) {
    std::vector<uint32_t> words = std::move(uses_[pair].words);
    std::sort(words.begin(), words.end());
    words.erase(std::unique(words.begin(), words.end()), words.end());
    std::vector<Pair> grown;
    for (const uint32_t index : words) {
      auto& [ids, count] = words_[index];
      size_t kept = 0;  // ids in front, with the pair merged; a word may be a file without a space
      for (size_t i = 0; i < ids.size(); ++i, ++kept) {
        ids[kept] = ids[i];
        if (i + 1 == ids.size() || Pair(ids[i], ids[i + 1]) != pair) continue;
        ids[kept] = whole;
        ++i;
        if (kept > 0) {
          change({ids[kept - 1], pair.first}, -count, index);
          change({ids[kept - 1], whole}, count, index);
          grown.emplace_back(ids[kept - 1], whole);
        }
        if (i + 1 < ids.size()) {
          change({pair.second, ids[i + 1]}, -count, index);
          change({whole, ids[i + 1]}, count, index);
          grown.emplace_back(whole, ids[i + 1]);
        }
      }
      ids.resize(kept);
    }
    uses_.erase(pair);
    std::sort(grown.begin(), grown.end());
    grown.erase(std::unique(grown.begin(), grown.end()), grown.end());
    for (const Pair& each : grown) {
      const auto found = uses_.find(each);
      if (found != uses_.end() && found->second.count > 0)
        candidates_.push({found->second.count, each});
    }
  }

  std::array<int32_t, 256> bytes_;
  Contents added_;
  std::vector<Word> words_;
  std::unordered_map<Pair, Use, PairHash> uses_;
  std::priority_queue<Candidate> candidates_;
};

}  // namespace

Tokenizer train_tokenizer(const TextSource& source, const TrainerOptions& options) {
  Tokenizer::Parts::Model model;
  const auto pattern = options.pattern.empty() ? Pattern::Qwen : pattern_of(options.pattern);
  if (!pattern) {
    throw ConfigError(
        fmt::format("[text] train_tokenizer: the pattern '{}' is not known; those of Qwen, GPT-2, "
                    "GPT-4 and Llama 3 are",
                    options.pattern));
  }
  const auto added = static_cast<int64_t>(options.added.size());
  if (options.vocabulary < 256 + added) {
    throw ConfigError(
        fmt::format("[text] train_tokenizer: vocabulary={} is too small for 256 bytes and {}",
                    options.vocabulary, counted(added, "added token")));
  }
  Contents contents = contents_of(options.added, options.nfc);
  model.pattern = *pattern;
  model.nfc = options.nfc;
  // Numbers in the order of the characters that stand for the bytes, as `tokenizers` gives them.
  std::array<uint8_t, 256> order;
  std::iota(order.begin(), order.end(), uint8_t{0});
  std::sort(order.begin(), order.end(),
            [](uint8_t a, uint8_t b) { return symbol_of(a) < symbol_of(b); });
  std::array<int32_t, 256> bytes;
  for (int32_t id = 0; id < 256; ++id) {
    const uint8_t byte = order[static_cast<size_t>(id)];
    bytes[byte] = id;
    model.vocabulary.emplace_back(std::string(1, static_cast<char>(byte)), id);
  }
  std::unordered_map<std::string, int64_t> counts;
  while (auto text = source()) {
    if (options.nfc && may_change_in_nfc(*text)) text = to_nfc(*text);
    const std::string_view whole = *text;
    for (size_t begin = 0; begin < whole.size();) {
      const size_t end = word_end(*pattern, whole, begin);
      ++counts[std::string(whole.substr(begin, end - begin))];
      begin = end;
    }
  }
  Training training(bytes, std::move(contents));
  for (const auto& [word, count] : counts) training.add(word, count);
  training.run(model, static_cast<size_t>(options.vocabulary - added), options.min_frequency);
  for (const auto& token : options.added) {
    model.added.emplace_back(token,
                             static_cast<int32_t>(model.vocabulary.size() + model.added.size()));
  }
  return Tokenizer(std::make_shared<const Tokenizer::Parts>(std::move(model), "train_tokenizer"));
}

Tokenizer train_tokenizer(const std::vector<std::string_view>& texts,
                          const TrainerOptions& options) {
  size_t next = 0;
  return train_tokenizer(
      [&]() -> std::optional<std::string> {
        return next < texts.size() ? std::optional(std::string(texts[next++])) : std::nullopt;
      },
      options);
}

}  // namespace lockstep::text
