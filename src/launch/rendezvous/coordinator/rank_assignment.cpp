#include "launch/rendezvous/coordinator/rank_assignment.h"

#include <algorithm>
#include <cctype>
#include <limits>

namespace lockstep::launch {
namespace {

bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }

// Moves the first guest for which `fits` holds into the empty place.
template <class Fits>
void fill(Candidate& place, std::vector<Candidate>& candidates, Fits fits) {
  if (place.id != 0) return;
  const auto found = std::find_if(candidates.begin(), candidates.end(), fits);
  if (found == candidates.end()) return;
  place = std::move(*found);
  candidates.erase(found);
}

}  // namespace

bool comes_before(const std::string& a, const std::string& b) {
  size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (!is_digit(a[i]) || !is_digit(b[j])) {
      if (a[i] != b[j]) return a[i] < b[j];
      ++i, ++j;
      continue;
    }
    const auto end = [](const std::string& text, size_t from) {
      while (from < text.size() && is_digit(text[from])) ++from;
      return from;
    };
    while (i < a.size() && a[i] == '0') ++i;
    while (j < b.size() && b[j] == '0') ++j;
    const size_t length_a = end(a, i) - i, length_b = end(b, j) - j;
    if (length_a != length_b) return length_a < length_b;
    const int order = a.compare(i, length_a, b, j, length_b);
    if (order != 0) return order < 0;
    i += length_a;
    j += length_b;
  }
  const size_t left_a = a.size() - i, left_b = b.size() - j;
  return left_a != left_b ? left_a < left_b : a < b;  // n09 and n9 are two hosts
}

std::vector<NodeId> RankAssignment::seat(std::vector<Candidate> candidates, int most) {
  if (candidates.size() > 1) {
    std::stable_sort(
        candidates.begin() + 1, candidates.end(), [](const Candidate& a, const Candidate& b) {
          return a.host != b.host ? comes_before(a.host, b.host) : a.launcher < b.launcher;
        });
  }
  std::vector<Candidate> places = std::move(before_);
  for (Candidate& place : places) place.id = 0;
  for (Candidate& place : places) {
    fill(place, candidates,
         [&](const Candidate& guest) { return guest.launcher == place.launcher; });
  }
  for (Candidate& place : places) {
    fill(place, candidates, [&](const Candidate& guest) { return guest.host == place.host; });
  }
  for (Candidate& place : places) {
    fill(place, candidates, [](const Candidate&) { return true; });
  }
  std::erase_if(places, [](const Candidate& place) { return place.id == 0; });
  for (Candidate& guest : candidates) places.push_back(std::move(guest));
  if (places.size() > static_cast<size_t>(most)) places.resize(static_cast<size_t>(most));
  const auto order = [](const Candidate& guest) {
    return guest.node_rank < 0 ? std::numeric_limits<int>::max() : guest.node_rank;
  };
  std::stable_sort(places.begin(), places.end(),
                   [order](const Candidate& a, const Candidate& b) { return order(a) < order(b); });
  before_ = places;
  std::vector<NodeId> ids;
  for (const Candidate& place : places) ids.push_back(place.id);
  return ids;
}

}  // namespace lockstep::launch
