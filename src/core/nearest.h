// Finds which of the known words was meant, for error messages.
#pragma once

#include <algorithm>
#include <cctype>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep {

// Levenshtein's distance, but two neighbours that changed places are one edit, and upper and lower
// case are the same.
inline size_t edits_between(std::string_view a, std::string_view b) {
  const auto is_same = [](unsigned char x, unsigned char y) {
    return std::tolower(x) == std::tolower(y);
  };
  std::vector<size_t> row(b.size() + 1), above(b.size() + 1), higher(b.size() + 1);
  std::iota(above.begin(), above.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = above[j - 1] + (is_same(a[i - 1], b[j - 1]) ? 0 : 1);
      row[j] = std::min({replaced, above[j] + 1, row[j - 1] + 1});
      if (i > 1 && j > 1 && is_same(a[i - 1], b[j - 2]) && is_same(a[i - 2], b[j - 1])) {
        row[j] = std::min(row[j], higher[j - 2] + 1);
      }
    }
    higher.swap(above);
    above.swap(row);
  }
  return above.back();
}

// How far `word` is from `known`, in half edits; nothing when it is too far to have been meant: by
// more than a third of the longer one. A half more than from the beginning of `known`: --nprocs is
// meant for --nproc-per-node, and a100 for a100-40gb rather than for a10.
inline std::optional<size_t> distance(std::string_view word, std::string_view known) {
  const size_t longer = std::max(word.size(), known.size());
  const size_t edits = edits_between(word, known);
  const size_t begun = edits_between(word, known.substr(0, word.size()));
  std::optional<size_t> found;
  if (edits < longer && edits <= std::max<size_t>(1, longer / 3)) found = 2 * edits;
  if (word.size() > 1 && begun <= word.size() / 4) {
    found = std::min(found.value_or(2 * begun + 1), 2 * begun + 1);
  }
  return found;
}

// The closest one; empty when none is close.
inline std::string nearest(std::string_view word, const std::vector<std::string>& known) {
  std::string closest;
  std::pair<size_t, size_t> least;
  for (const std::string& one : known) {
    const auto far = distance(word, one);
    if (!far) continue;
    const std::pair here(*far, edits_between(word, one));  // of two beginnings the shorter word
    if (!closest.empty() && here >= least) continue;
    closest = one;
    least = here;
  }
  return closest;
}

// The closest one in the words of a message, "; the nearest is seed"; empty when none is close.
inline std::string hint_of(std::string_view word, const std::vector<std::string>& known,
                           std::string_view before = "; the nearest is ",
                           std::string_view after = "") {
  std::string hint = nearest(word, known);
  if (!hint.empty()) hint.insert(0, before).append(after);
  return hint;
}

}  // namespace lockstep
