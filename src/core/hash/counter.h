// Random numbers that a key names: the same on every host, in any order, on any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "core/hash/mix.h"

namespace lockstep {

// One number of several, in this order: the randomness that a key names. counter(seed, step, lane)
// is stream_seed().
template <class... Numbers>
uint64_t counter(Numbers... key) {
  uint64_t hash = 0;
  ((hash = mix(hash ^ static_cast<uint64_t>(key))), ...);
  return hash;
}

// A number of 64 random bits as one in [0, 1).
inline double unit_interval(uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

// The numbers that a key names, one after another: counter(key..., 1), counter(key..., 2), ...
class Draws {
 public:
  template <class... Numbers>
  explicit Draws(Numbers... key) : key_(counter(key...)) {}

  uint64_t next() { return mix(key_ ^ ++drawn_); }
  // In [0, count). The remainder's bias is below count / 2^64.
  uint64_t below(uint64_t count) { return next() % count; }
  // In [0, 1).
  double uniform() { return unit_interval(next()); }
  bool chance(double probability) { return uniform() < probability; }
  // One of the values of a list.
  template <class List>
  const auto& pick(const List& list) {
    return *(std::begin(list) + static_cast<std::ptrdiff_t>(below(std::size(list))));
  }

 private:
  uint64_t key_;
  uint64_t drawn_ = 0;
};

}  // namespace lockstep
