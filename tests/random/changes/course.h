// A training that changes while it runs: what is drawn, as plain data.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "random/common/dice.h"

namespace lockstep::test::changes {

constexpr int kBlocks = 4;
constexpr int kBatch = 24;  // samples of a step, on all ranks together
constexpr int kEpoch = 72;  // samples of the data set

// What a training is wrapped in.
enum class Kind {
  Ddp,
  Zero,
  SharedZero,
  Fsdp,
  // In nothing, or in a Ddp with LocalSgd: an Averager averages the parameters of every second
  // step, and of the last.
  Local,
};

// By what a Ddp averages, with more than one rank and without lanes.
enum class Hook { None, Float, Half, BFloat, TopK, PowerSgd };

// What becomes of buffers, in which each rank counts samples of its own.
enum class Shared { FirstRanks, Average, None };

enum class What {
  Freeze,     // the parameters of block `block`
  Thaw,       // the same
  Rate,       // the optimizer's group `block`, modulo their number, has another learning rate
  AddGroup,   // of the parameters of block `block`, which no group has
  DropGroup,  // the last one that was added
  Replace,    // layer `up` of block `block` by a new one
  Tie,        // layer `up` of block `block` becomes that of block `other`
  TieWeight,  // its weight alone
  Skip,       // the forward leaves block `block` out, or takes it in again
  Overflow,   // of one rank's loss
  Refresh,    // without a reason
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
  // Of a step in micro-batches or lanes: before that one of them; 0: before the step.
  int part = 0;
};

// What one world does: then everything is saved and destroyed, and others restore it.
struct Phase {
  Kind kind = Kind::Ddp;
  std::vector<int> ranks;  // of the world
  int steps = 1;
  std::string optimizer;
  // Of the steps, so many are within a Join, for the last of which some ranks have no batch.
  std::vector<int> joined;  // by rank; empty: none
  bool divides_by_active = false;
  // Further steps, which are saved, too; what follows goes on from the checkpoint before them.
  int discarded = 0;
  bool narrow = false;   // an Fsdp that computes in float32
  bool reduced = false;  // gradients are added up in float32; a narrow Fsdp's in float64
  // Of a Local: the first so many passes of a Ddp average gradients, and then ranks have their own,
  // or those of a pair. Below 0: no Ddp.
  int local_from = -1;
  bool in_pairs = false;
  bool async = false;
  uint64_t seed = 0;  // of options that change no result
};

enum class Clear { Wrapper, Optimizer, Zeros };

struct Course {
  uint64_t seed = 0;
  int lanes = 0;
  int micros = 1;
  bool scaled = false;
  std::optional<double> average;  // the decay of a WeightAverage; 1: the plain mean
  int average_from = 0;           // WeightAverageOptions::start
  int average_every = 1;
  enum class Clip { None, Norm, Value } clip = Clip::None;
  Hook hook = Hook::None;
  bool feedback = false;    // of its errors
  bool normalized = false;  // BatchNorm, over all ranks
  bool drops = false;       // dropout
  double gamma = 1;         // by which each step's rates are multiplied; 1: no LrScheduler
  int optimizers = 1;       // which have every other group
  Shared buffers = Shared::FirstRanks;
  bool is_strict = false;     // a Ddp refuses what has no gradient
  int models = 1;             // with a Ddp each, of half of the blocks; an Fsdp has all
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
  bool has(Kind kind) const;
  // Whether the phase's optimizers begin without a state.
  bool is_fresh(size_t phase) const;
  bool has_hook(size_t phase) const;
  bool has_ddp(size_t phase) const;
  // The first step within a Join; the phase's end without.
  int first_joined(size_t phase) const;
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

// "adam" of "adam" and "fused_adam".
std::string family_of(const std::string& optimizer);

// With which words all ranks refuse a phase; empty: they do not.
std::string refusal_of(const Course& course, size_t phase);

}  // namespace lockstep::test::changes
