// Hashes of numbers and short texts, the same on every host.
#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep {

// SplitMix64's step (Steele et al., "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014):
// a bijection of 64 bits whose outputs look independent even for neighbouring inputs.
inline uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

// FNV-1a (Fowler, Noll and Vo), in 32 bits or 64.
template <class Unsigned>
Unsigned fnv1a(std::string_view text) {
  constexpr bool is_wide = sizeof(Unsigned) == 8;
  auto hash = static_cast<Unsigned>(is_wide ? 14695981039346656037U : 2166136261U);
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) *
           static_cast<Unsigned>(is_wide ? 1099511628211U : 16777619U);
  }
  return hash;
}

}  // namespace lockstep
