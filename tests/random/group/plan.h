// A program with every tensor in its place.
#pragma once

#include "random/group/program.h"

namespace lockstep::random_group {

// As of at::as_strided, into an arena.
struct View {
  int buffer = 0, arena = 0;
  int64_t offset = 0;
  std::vector<int64_t> sizes, strides;

  int64_t numel() const;
  // Of its elements in order, in the arena.
  std::vector<int64_t> places() const;
};

// What one rank gives to one call.
struct Call {
  std::vector<int> members;  // of its group, indices into program.ranks
  int rank = 0;              // in the group
  int root = 0, to = 0;      // in the group
  bool sends = false, receives = false;
  std::vector<View> inputs, outputs;
};

struct Plan {
  explicit Plan(const Program& program);

  struct Place {
    int64_t begin = 0, count = 0;
  };
  std::vector<Place> buffers;        // in their arenas
  std::vector<int64_t> arena_sizes;  // elements of one rank
  // By operation and rank; nothing where the rank does not call.
  std::vector<std::vector<std::optional<Call>>> calls;
};

}  // namespace lockstep::random_group
