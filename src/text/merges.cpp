#include "text/merges.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <queue>
#include <utility>

namespace lockstep::text {
namespace {

// Up to this many bytes a search for the best pair is quicker than a heap.
constexpr size_t kShort = 48;

uint64_t pair_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

size_t hash(uint64_t pair) {
  pair *= 0x9E3779B97F4A7C15ULL;
  return pair ^ pair >> 32;
}

}  // namespace

Merges::Merges(std::vector<Merge> merges, const std::array<int32_t, 256>& bytes)
    : merges_(std::move(merges)), bytes_(bytes) {
  slots_.resize(std::bit_ceil(2 * merges_.size() + 1));
  for (size_t rank = 0; rank < merges_.size(); ++rank) {
    const uint64_t pair = pair_of(merges_[rank].left, merges_[rank].right);
    size_t i = hash(pair) & (slots_.size() - 1);
    while (slots_[i].rank != kNone && slots_[i].pair != pair) i = (i + 1) & (slots_.size() - 1);
    slots_[i] = {pair, static_cast<uint32_t>(rank)};
  }
}

uint32_t Merges::rank_of(int32_t left, int32_t right) const {
  const uint64_t pair = pair_of(left, right);
  for (size_t i = hash(pair) & (slots_.size() - 1);; i = (i + 1) & (slots_.size() - 1)) {
    if (slots_[i].rank == kNone || slots_[i].pair == pair) return slots_[i].rank;
  }
}

void Merges::encode(std::string_view word, std::vector<int32_t>& ids) const {
  if (word.size() <= kShort) {
    encode_short(word, ids);
  } else {
    encode_long(word, ids);
  }
}

void Merges::encode_short(std::string_view word, std::vector<int32_t>& ids) const {
  std::array<int32_t, kShort> parts;
  std::array<uint32_t, kShort> ranks;  // of a part with the next
  size_t n = word.size();
  for (size_t i = 0; i < n; ++i) parts[i] = bytes_[static_cast<uint8_t>(word[i])];
  for (size_t i = 0; i < n; ++i) ranks[i] = i + 1 < n ? rank_of(parts[i], parts[i + 1]) : kNone;
  while (n > 1) {
    const auto best = std::min_element(ranks.begin(), ranks.begin() + static_cast<long>(n) - 1);
    if (*best == kNone) break;
    const size_t i = static_cast<size_t>(best - ranks.begin());
    parts[i] = merges_[*best].whole;
    for (size_t k = i + 1; k + 1 < n; ++k) {
      parts[k] = parts[k + 1];
      ranks[k] = ranks[k + 1];
    }
    --n;
    if (i + 1 < n) ranks[i] = rank_of(parts[i], parts[i + 1]);
    if (i > 0) ranks[i - 1] = rank_of(parts[i - 1], parts[i]);
  }
  ids.insert(ids.end(), parts.begin(), parts.begin() + static_cast<long>(n));
}

void Merges::encode_long(std::string_view word, std::vector<int32_t>& ids) const {
  constexpr uint32_t kGone = UINT32_MAX;
  struct Part {
    int32_t id;
    uint32_t before, next;
  };
  const uint32_t n = static_cast<uint32_t>(word.size());
  std::vector<Part> parts(n);
  for (uint32_t i = 0; i < n; ++i) {
    parts[i] = {bytes_[static_cast<uint8_t>(word[i])], i == 0 ? kGone : i - 1, i + 1};
  }
  // (rank, position): the smallest comes first. What has changed since is found out when it comes.
  using Candidate = std::pair<uint32_t, uint32_t>;
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates;
  const auto consider = [&](uint32_t i) {
    if (i == kGone || parts[i].next >= n) return;
    const uint32_t rank = rank_of(parts[i].id, parts[parts[i].next].id);
    if (rank != kNone) candidates.emplace(rank, i);
  };
  for (uint32_t i = 0; i < n; ++i) consider(i);
  while (!candidates.empty()) {
    const auto [rank, i] = candidates.top();
    candidates.pop();
    const Merge& merge = merges_[rank];
    const uint32_t next = parts[i].next;
    if (parts[i].id != merge.left || next >= n || parts[next].id != merge.right) continue;
    parts[i] = {merge.whole, parts[i].before, parts[next].next};
    parts[next].id = -1;
    if (parts[i].next < n) parts[parts[i].next].before = i;
    consider(i);
    consider(parts[i].before);
  }
  for (uint32_t i = 0; i < n; i = parts[i].next) ids.push_back(parts[i].id);
}

}  // namespace lockstep::text
