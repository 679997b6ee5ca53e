#include "comm/host/core_sets.h"

#include <algorithm>
#include <bit>
#include <cstddef>

namespace lockstep::comm {
namespace {

bool is_within(const CoreSet& part, const CoreSet& whole) {
  for (size_t i = 0; i < part.size(); ++i) {
    if ((part[i] & ~whole[i]) != 0) return false;
  }
  return true;
}

int64_t size_of_set(const CoreSet& set) {
  int64_t cores = 0;
  for (const uint8_t bits : set) cores += std::popcount(bits);
  return cores;
}

}  // namespace

CoreSet core_set(const std::vector<int>& cores) {
  CoreSet set{};
  for (const int core : cores) {
    const auto byte = static_cast<size_t>(core) / 8;
    if (byte < set.size()) set[byte] = static_cast<uint8_t>(set[byte] | 1u << (core % 8));
  }
  return set;
}

bool each_has_a_core(const std::vector<CoreSet>& ranks) {
  CoreSet all{};
  for (const CoreSet& set : ranks) {
    for (size_t i = 0; i < all.size(); ++i) all[i] |= set[i];
  }
  if (size_of_set(all) < std::ssize(ranks)) return false;
  return std::ranges::all_of(ranks, [&](const CoreSet& set) {
    const auto rivals =
        std::ranges::count_if(ranks, [&](const CoreSet& other) { return is_within(other, set); });
    return rivals <= size_of_set(set);
  });
}

}  // namespace lockstep::comm
