#include "text/composition.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "text/unicode_decompositions.inl"
#include "text/unicode_marks.inl"

namespace lockstep::text {
namespace {

// Syllables of Hangul are made of leading consonants, vowels and trailing consonants by a formula.
constexpr uint32_t kSyllables = 0xAC00, kLeading = 0x1100, kVowels = 0x1161, kTrailing = 0x11A7;
constexpr uint32_t kLeadingCount = 19, kVowelCount = 21, kTrailingCount = 28;
constexpr uint32_t kSyllableCount = kLeadingCount * kVowelCount * kTrailingCount;

uint64_t pair_of(uint32_t first, uint32_t second) {
  return static_cast<uint64_t>(first) << 32 | second;
}

struct Tables {
  Tables() {
    const std::unordered_set<uint32_t> never(std::begin(kNeverComposed), std::end(kNeverComposed));
    for (size_t i = 0; i < std::size(kDecompositions); i += 3) {
      const uint32_t whole = kDecompositions[i];
      const uint32_t first = kDecompositions[i + 1], second = kDecompositions[i + 2];
      parts[whole] = {first, second};
      if (second != 0 && !never.contains(whole)) wholes[pair_of(first, second)] = whole;
    }
    for (size_t i = 0; i < std::size(kMarks); i += 3) {
      for (uint32_t c = kMarks[i]; c < kMarks[i + 1]; ++c) classes[c] = kMarks[i + 2];
    }
  }
  std::unordered_map<uint32_t, std::pair<uint32_t, uint32_t>> parts;
  std::unordered_map<uint64_t, uint32_t> wholes;
  std::unordered_map<uint32_t, uint32_t> classes;

  uint32_t class_of(uint32_t code) const {
    const auto found = classes.find(code);
    return found == classes.end() ? 0 : found->second;
  }
};

const Tables& tables() {
  static const Tables all;
  return all;
}

void decompose(uint32_t code, std::vector<uint32_t>& out) {
  if (code >= kSyllables && code < kSyllables + kSyllableCount) {
    const uint32_t i = code - kSyllables;
    out.push_back(kLeading + i / (kVowelCount * kTrailingCount));
    out.push_back(kVowels + i / kTrailingCount % kVowelCount);
    if (i % kTrailingCount != 0) out.push_back(kTrailing + i % kTrailingCount);
    return;
  }
  const auto found = tables().parts.find(code);
  if (found == tables().parts.end()) {
    out.push_back(code);
    return;
  }
  decompose(found->second.first, out);
  if (found->second.second != 0) out.push_back(found->second.second);  // never has parts itself
}

// What both make together, or 0.
uint32_t compose(uint32_t first, uint32_t second) {
  if (first >= kLeading && first < kLeading + kLeadingCount && second >= kVowels &&
      second < kVowels + kVowelCount) {
    return kSyllables + ((first - kLeading) * kVowelCount + second - kVowels) * kTrailingCount;
  }
  if (first >= kSyllables && first < kSyllables + kSyllableCount &&
      (first - kSyllables) % kTrailingCount == 0 && second > kTrailing &&
      second < kTrailing + kTrailingCount) {
    return first + second - kTrailing;
  }
  const auto found = tables().wholes.find(pair_of(first, second));
  return found == tables().wholes.end() ? 0 : found->second;
}

}  // namespace

std::vector<uint32_t> composed(const std::vector<uint32_t>& codes) {
  std::vector<uint32_t> all;
  for (const uint32_t code : codes) decompose(code, all);
  struct Marked {
    uint32_t code, order;
  };
  std::vector<Marked> marked;
  for (const uint32_t code : all) marked.push_back({code, tables().class_of(code)});
  for (auto at = marked.begin(); at != marked.end();) {
    if (at->order == 0) {
      ++at;
      continue;
    }
    const auto end = std::find_if(at, marked.end(), [](const Marked& m) { return m.order == 0; });
    std::stable_sort(at, end, [](const Marked& a, const Marked& b) { return a.order < b.order; });
    at = end;
  }
  std::vector<uint32_t> out;
  constexpr size_t kNone = static_cast<size_t>(-1);
  size_t starter = kNone;  // in `out`
  uint32_t last = 0;       // class of what stands after the starter
  for (const auto& [code, order] : marked) {
    // Blocked: something of the same or a higher class, or another starter, stands between.
    const bool adjacent = starter != kNone && out.size() == starter + 1;
    if (starter != kNone && (adjacent || last < order)) {
      if (const uint32_t whole = compose(out[starter], code)) {
        out[starter] = whole;
        continue;
      }
    }
    if (order == 0) starter = out.size();
    last = order;
    out.push_back(code);
  }
  return out;
}

void for_each_unstable(const std::function<void(uint32_t)>& visit) {
  for (const auto& [whole, parts] : tables().parts) {
    const auto found = tables().wholes.find(pair_of(parts.first, parts.second));
    if (found == tables().wholes.end()) visit(whole);
  }
  for (const auto& [pair, whole] : tables().wholes) visit(static_cast<uint32_t>(pair));
  for (const auto& [mark, order] : tables().classes) visit(mark);
  for (uint32_t i = 0; i < kVowelCount; ++i) visit(kVowels + i);
  for (uint32_t i = 1; i < kTrailingCount; ++i) visit(kTrailing + i);
}

}  // namespace lockstep::text
