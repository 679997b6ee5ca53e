// Numbers that follow from seeds alone, on every machine.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep::test {

// splitmix64's output function: neighbouring inputs give unrelated outputs.
inline uint64_t mixed(uint64_t a) {
  a = (a ^ a >> 30) * 0xbf58476d1ce4e5b9;
  a = (a ^ a >> 27) * 0x94d049bb133111eb;
  return a ^ a >> 31;
}
inline uint64_t mixed(uint64_t a, uint64_t b) {
  return mixed(mixed(a + 0x9e3779b97f4a7c15) ^ (b + 0x2545f4914f6cdd1d));
}
inline uint64_t mixed(uint64_t a, uint64_t b, uint64_t c) { return mixed(mixed(a, b), c); }

class Dice {
 public:
  explicit Dice(uint64_t seed) : state_(seed) {}

  uint64_t next() { return mixed(state_ += 0x9e3779b97f4a7c15); }
  // 0 .. n - 1.
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  bool one_in(int n) { return below(n) == 0; }
  template <class T>
  const T& pick(const std::vector<T>& list) {
    return list[below(static_cast<int64_t>(list.size()))];
  }
  template <class T>
  void shuffle(std::vector<T>& list) {
    for (size_t i = list.size(); i > 1; --i) std::swap(list[i - 1], list[below(i)]);
  }

 private:
  uint64_t state_;
};

}  // namespace lockstep::test
