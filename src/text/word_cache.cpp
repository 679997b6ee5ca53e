#include "text/word_cache.h"

#include <cstring>

namespace lockstep::text {

uint64_t WordCache::hash(std::string_view word) {
  constexpr uint64_t kPrime = 0x9E3779B97F4A7C15ULL;
  uint64_t h = word.size() * kPrime;
  const auto mix = [&h](uint64_t bytes) {
    h = (h ^ bytes) * kPrime;
    h ^= h >> 32;
  };
  size_t i = 0;
  for (; i + 8 <= word.size(); i += 8) {
    uint64_t eight;
    std::memcpy(&eight, word.data() + i, 8);
    mix(eight);
  }
  uint64_t rest = 0;
  for (size_t shift = 0; i < word.size(); ++i, shift += 8) {
    rest |= static_cast<uint64_t>(static_cast<uint8_t>(word[i])) << shift;
  }
  mix(rest);
  return h;
}

std::optional<std::span<const int32_t>> WordCache::find(std::string_view word) const {
  if (word.size() > kLongest) return std::nullopt;
  const uint64_t h = hash(word);
  for (size_t i = h % kSlots;; i = (i + 1) % kSlots) {
    const Slot& slot = slots_[i];
    if (slot.id_count == 0) return std::nullopt;
    if (slot.hash == static_cast<uint32_t>(h >> 32) && slot.word_bytes == word.size() &&
        std::memcmp(words_.data() + slot.word, word.data(), word.size()) == 0) {
      return std::span(ids_).subspan(slot.ids, slot.id_count);
    }
  }
}

void WordCache::insert(std::string_view word, std::span<const int32_t> ids) {
  if (word.size() > kLongest || ids.empty()) return;
  if (count_ == kMostWords) {
    slots_.assign(kSlots, {});
    words_.clear();
    ids_.clear();
    count_ = 0;
  }
  const uint64_t h = hash(word);
  size_t i = h % kSlots;
  while (slots_[i].id_count != 0) i = (i + 1) % kSlots;
  slots_[i] = {.hash = static_cast<uint32_t>(h >> 32),
               .word = static_cast<uint32_t>(words_.size()),
               .ids = static_cast<uint32_t>(ids_.size()),
               .word_bytes = static_cast<uint16_t>(word.size()),
               .id_count = static_cast<uint16_t>(ids.size())};
  words_.append(word);
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  ++count_;
}

}  // namespace lockstep::text
