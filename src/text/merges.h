// Byte-pair encoding of one word.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace lockstep::text {

// Two adjacent tokens, and the token that both become.
struct Merge {
  int32_t left, right, whole;
};

class Merges {
 public:
  // In the order in which they are preferred; of equal pairs the last counts, as in `tokenizers`.
  // `bytes[b]` is the token of byte b.
  Merges(std::vector<Merge> merges, const std::array<int32_t, 256>& bytes);

  // Appends the word's tokens: of all adjacent pairs that can be merged, the one that is preferred,
  // and of equal ones the leftmost, is merged first, until there is none.
  void encode(std::string_view word, std::vector<int32_t>& ids) const;

  std::span<const Merge> all() const { return merges_; }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Slot {
    uint64_t pair = UINT64_MAX;
    uint32_t rank = kNone;  // in merges_
  };
  // The pair's rank, or kNone.
  uint32_t rank_of(int32_t left, int32_t right) const;
  void encode_short(std::string_view word, std::vector<int32_t>& ids) const;
  void encode_long(std::string_view word, std::vector<int32_t>& ids) const;

  std::vector<Merge> merges_;
  std::array<int32_t, 256> bytes_;
  std::vector<Slot> slots_;
};

}  // namespace lockstep::text
