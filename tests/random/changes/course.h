// A training that changes while it runs: what is drawn, as plain data.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "random/common/dice.h"

namespace lockstep::test::changes {

constexpr int kBlocks = 4;
constexpr int kBatch = 24;  // samples of a step, on all ranks together
constexpr int kEpoch = 72;  // samples of the data set

// What a training is wrapped in.
enum class Kind { Ddp, Zero, SharedZero, Fsdp };

enum class What {
  Freeze,    // the parameters of block `block`
  Thaw,      // the same
  Rate,      // the optimizer's group `block`, modulo their number, has another learning rate
  AddGroup,  // of the parameters of block `block`, which no group has
  Replace,   // layer `up` of block `block` by a new one
  Tie,       // layer `up` of block `block` becomes that of block `other`
  Skip,      // the forward leaves block `block` out, or takes it in again
  Overflow,  // of one rank's loss
  Refresh,   // without a reason
};

// Done between two steps.
struct Change {
  int step = 0;
  What what = What::Refresh;
  int block = 0;
  int other = 0;
  // Of changes of which a Ddp is to be told: whether it is.
  bool told = true;
  // Of those that give the optimizer other parameters: it is made anew, without a state.
  bool anew = false;
};

// What one world does: then everything is saved and destroyed, and others restore it.
struct Phase {
  Kind kind = Kind::Ddp;
  std::vector<int> ranks;  // of the world
  int steps = 1;
  bool async = false;
  uint64_t seed = 0;  // of options that change no result
};

enum class Clear { Wrapper, Optimizer, Zeros };

struct Course {
  uint64_t seed = 0;
  std::string optimizer;
  int lanes = 0;
  int micros = 1;
  bool scaled = false, averaged = false, clipped = false;
  bool synchronized = false;  // by an Averager, which finds nothing to do
  bool clears_first = false;  // gradients are cleared before a step's changes
  Clear clear = Clear::Wrapper;
  std::vector<int> late;    // blocks that no group has in the beginning
  std::vector<int> frozen;  // in the beginning
  std::vector<Change> changes;
  std::vector<Phase> phases;

  std::string text() const;
  int steps() const;
  // The first step of phase `phase`.
  int begin(size_t phase) const;
};

// Courses that a world trains at the same time, on ranks that they do not share.
struct Program {
  uint64_t seed = 0;
  int ranks = 1;
  std::string backend;
  std::vector<int> hosts;
  std::vector<Course> courses;

  std::string text() const;
};

// `ranks`: 0, or how many. Of the drawn changes those are left out whose numbers `without` has,
// counted through all courses.
Program drawn(uint64_t seed, const std::string& backend, int ranks,
              const std::vector<int>& without);

// With which words all ranks refuse a phase; empty: they do not.
std::string refusal_of(const Course& course, size_t phase);

}  // namespace lockstep::test::changes
