// A random training program: what it is made of, as plain data and as text.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::test::training {

// SplitMix64 (Steele et al., OOPSLA 2014). One is made for each purpose, so that taking a piece out
// of a program leaves the others as they are.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next();
  int64_t below(int64_t end) { return static_cast<int64_t>(next() % static_cast<uint64_t>(end)); }
  int64_t between(int64_t least, int64_t most) { return least + below(most - least + 1); }
  bool chance(double probability) {
    return static_cast<double>(next() >> 11) * 0x1p-53 < probability;
  }
  template <class T>
  T pick(std::initializer_list<T> of) {
    return of.begin()[below(static_cast<int64_t>(of.size()))];
  }

 private:
  uint64_t state_;
};

// A layer or a feature, and the seed of what it decides by itself.
struct Part {
  std::string name;
  uint64_t seed = 0;

  bool operator==(const Part&) const = default;
};

struct Program {
  uint64_t seed = 0;  // of initial values and data
  int ranks = 1;
  // hosts[r]: on which pretended host rank r is; empty: all on one.
  std::string backend = "solo";
  std::vector<int> hosts;
  int steps = 1;
  // Variants of a program differ in backend, hosts and the sizes of buckets, and in no bit of their
  // results.
  int variant = 0;
  Part optimizer;
  std::vector<Part> layers;
  std::vector<Part> features;

  bool has(std::string_view feature) const;
  // Into how many lanes a step is cut; 0 without.
  int lanes() const;
  // Parts of the whole batch: lanes, or ranks.
  int parts() const { return lanes() > 0 ? lanes() : ranks; }
  bool has_layer(std::string_view prefix) const;
  const Part* feature(std::string_view name) const;
  // One line, which parse() reads.
  std::string text() const;
  static Program parse(std::string_view text);

  bool operator==(const Program&) const = default;
};

// The program of a seed.
Program compose(uint64_t seed);

// Another backend and other buckets for the same program.
Program variant_of(const Program& program);
// With lanes: the same program on one rank, or on several when it has one.
Program on_other_ranks(const Program& program);

// A world of this backend for so many ranks, and how its ranks are spread over hosts.
void place(Program& program, std::string_view backend, Random& random);

}  // namespace lockstep::test::training
