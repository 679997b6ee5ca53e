// The language of random programs for Group. Every rank runs the same steps; what differs by rank
// follows from seeds in the program, so that a program can lose ranks, operations and elements and
// still be one. No torch operations.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "random/common/dice.h"

namespace lockstep::random_group {

using test::Dice;
using test::mixed;

// Memory that operations take their tensors from. Buffers cut it into ranges that do not meet.
struct Arena {
  enum class Kind {
    Private,
    OfGroup,  // Group::empty
    Shared,   // Group::shared, where there is such memory; each rank uses a part of its own
  };
  Kind kind = Kind::Private;
  int group = 0;
  c10::ScalarType dtype = c10::kFloat;
  uint64_t seed = 0;  // of its first contents
};

struct Buffer {
  int arena = 0;
};

// Group s + 1 is, on each rank, the one that it got from splits[s]. By number of the rank before
// any was dropped.
struct Split {
  int parent = 0;
  std::vector<int> colors, keys;
  bool lists = false;  // by subgroup(), of those with color 0; the others have -1
};

enum class What {
  AllReduce,
  Reduce,
  ReduceScatter,
  AllGather,
  Broadcast,
  Gather,
  Scatter,
  AllToAll,
  Message,   // from the root to another rank
  SendRecv,  // to the rank `to` places on, and from the one as many before
  // Several tensors in one call.
  AllReduces,
  Broadcasts,
  AllGathers,
  ReduceScatters,
  Barrier,
  AllGatherBytes,
  GatherBytes,
  BroadcastBytes,
};

// One call of every rank, each in its own group of those that group `group` stands for.
struct Op {
  What what = What::Barrier;
  int group = 0;
  int only = -1;  // ranks with another color than that in the split of `group` leave the call out;
                  // -1: none does
  comm::ReduceOp op = comm::ReduceOp::Sum;  // PreMulSum multiplies by factor_of()
  int divide_by = 0;                        // of an Average
  int root = 0, to = 1;                     // modulo the size of the group
  int64_t count = 0;                        // elements of a part; lists have parts of up to as many
  bool list = false;                        // where a call takes one tensor or a list
  bool in_place =
      false;  // all_gather: the input is a part of the output; reduce_scatter: the reverse
  // Where inputs and outputs lie; the second is for some of the ranks.
  int inputs[2] = {0, 0}, outputs[2] = {0, 0};
  // Of a call of several tensors: where inputs and outputs of another dtype lie; below 0: none.
  int others[2] = {-1, -1};
  bool twice = false;     // such a call in place: the last tensor is the first once more
  bool overlaps = false;  // inputs lie where the outputs do
  bool plain = false;     // contiguous vectors, one behind the other
  bool fill = false;      // new values before the call
  bool small = false;     // whole numbers from 0 to 2
  bool drops = false;     // some ranks drop the Work
  bool late = false;      // a message that some ranks start after the collective that follows it
  bool polls = false;     // some ranks ask is_completed() until it says so, before they wait
  bool labelled = false;  // some ranks give a label and a deadline of their own
  bool refused = false;   // some ranks try a call that Group refuses first
  int then = -1;          // the operation that follows by then(); it has no Start
  bool follows = false;   // it is such an operation
  uint64_t seed = 0;
};

struct Step {
  enum class Kind { Split, Allocate, Start, Wait, Poll };
  Kind kind = Kind::Start;
  int which = 0;         // Split, Allocate: of which; Start, Poll: of which operation
  std::vector<int> ops;  // Wait
  uint64_t seed = 0;     // Wait: each rank's order
  // Wait for an operation that some ranks dropped: it is over there, too, since they have waited
  // for something else.
  bool settled = false;
};

struct Program {
  uint64_t seed = 0;
  std::vector<int> hosts;  // by rank; empty: one host
  std::vector<int> ranks;  // those that are left, as they were first numbered
  std::vector<Split> splits;
  std::vector<Arena> arenas;
  std::vector<Buffer> buffers;
  std::vector<Op> ops;
  std::vector<Step> steps;

  int size() const { return static_cast<int>(ranks.size()); }
};

// What a world can be asked for.
struct Traits {
  bool tree_order =
      true;  // otherwise only whole numbers that every order of summation adds up alike
  bool bitwise = true;
  bool drops = true, polls = true;  // what becomes of Works
  bool any_order = true;            // works of one group are waited for in any order
  bool splits = true;               // groups are split
};

Program generate(uint64_t seed, int ranks, const Traits& traits);

// Why a program breaks Group's contract, if it does.
std::optional<std::string> fault_in(const Program& program);

// For people, with every rank's tensors.
std::string text_of(const Program& program);

bool is_bytes(What what);
bool is_reduction(What what);
// Of several tensors in one call, and how many.
bool is_several(What what);
bool is_in_place(What what);
int tensors_of(const Op& op);
// What a rank multiplies by for a PreMulSum, by its first number.
double factor_of(const Op& op, int name);
// All buffers that the operation may use.
std::vector<int> memory_of(const Op& op);
// Whether all ranks that call `dropped` have finished it when they have waited for `op`.
bool finishes(const Op& op, const Op& dropped);
// Whether `rank` (an index into program.ranks) drops the Work.
bool drops(const Program& program, int op, int rank);
// The ranks in the group of `rank` that `group` stands for, in order; all are indices into
// program.ranks.
std::vector<int> members(const Program& program, int group, int rank);
// Whether `rank` makes the call.
bool takes_part(const Program& program, int op, int rank);

}  // namespace lockstep::random_group
