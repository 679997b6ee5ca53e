// Finds which of the known words was meant, for error messages.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep {

// Levenshtein's distance.
inline size_t edits_between(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

// As above, or one more when `word` is close to the beginning of `known`: --nprocs is meant for
// --nproc-per-node.
inline size_t distance(std::string_view word, std::string_view known) {
  return std::min(edits_between(word, known),
                  edits_between(word, known.substr(0, word.size())) + 1);
}

// The closest one; empty when there is none.
inline std::string nearest(std::string_view word, const std::vector<std::string>& known) {
  const auto closest = std::min_element(
      known.begin(), known.end(),
      [word](const auto& a, const auto& b) { return distance(word, a) < distance(word, b); });
  return closest == known.end() ? "" : *closest;
}

}  // namespace lockstep
