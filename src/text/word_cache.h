// The tokens of words that came before.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::text {

// Holds at most 48 Ki words of at most 64 bytes; when it is full it begins again. For one thread.
class WordCache {
 public:
  WordCache() : slots_(kSlots) {}

  // Valid until insert().
  std::optional<std::span<const int32_t>> find(std::string_view word) const;

  void insert(std::string_view word, std::span<const int32_t> ids);

 private:
  static constexpr size_t kSlots = 1 << 16;
  static constexpr size_t kMostWords = kSlots / 4 * 3;
  static constexpr size_t kLongest = 64;

  struct Slot {
    uint32_t hash = 0;
    uint32_t word = 0;  // where it begins in words_
    uint32_t ids = 0;   // where they begin in ids_
    uint16_t word_bytes = 0;
    uint16_t id_count = 0;  // 0: free
  };
  static uint64_t hash(std::string_view word);

  std::vector<Slot> slots_;
  std::string words_;
  std::vector<int32_t> ids_;
  size_t count_ = 0;
};

}  // namespace lockstep::text
