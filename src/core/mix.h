// One step of a good hash.
#pragma once

#include <cstdint>

namespace lockstep {

// SplitMix64's step (Steele et al., "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014):
// a bijection of 64 bits whose outputs look independent even for neighbouring inputs.
inline uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

}  // namespace lockstep
