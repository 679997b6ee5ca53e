// The parameter of which an optimizer's leaf is a part.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "lockstep/checkpoint/state.h"
#include "lockstep/core/shard.h"

namespace lockstep::checkpoint {

// The elements of a parameter that come `range` in its memory, which one rank has as a tensor of
// one dimension.
struct PartOf {
  std::string name;  // the parameter's, in its module
  Sizes sizes;       // of the parameter
  Sizes strides;
  Range range;
  bool saves = true;                  // not of further copies of the part, on other ranks
  bool is_first = true;               // on the first of the ranks over which it is sharded
  int ranks = 1;                      // over which the parameter is sharded
  std::vector<int> world_ranks = {};  // their numbers in the world

  // Whether the parameter has no element, and this is the one rank that describes it.
  bool is_of_nothing() const { return elements(sizes) == 0 && is_first; }
  // Whether all of them are among these.
  bool is_within(std::vector<int> others) const;
};

// Marks a tensor as such a part, for as long as the tensor lives.
void mark_part(const at::Tensor& leaf, PartOf whole);
// Null when there was none.
const PartOf* part_of(const at::Tensor& leaf);

// `values`, one for each element of a range of a parameter's memory, as boxes.
std::vector<Part> parts_of(const Sizes& sizes, const Sizes& strides, const Range& range,
                           const at::Tensor& values);

// This rank's part of what belongs to a parameter, of the parameter's sizes: `values`, one for each
// element of the range.
Piece part_piece(std::string name, const PartOf& whole, const at::Tensor& values);

// By this value a checkpoint says that a communication hook was tracked, which may have had no
// state yet. A run without the hook lacks nothing of it.
inline constexpr const char* kHookIsThere = "hook_is_there";

}  // namespace lockstep::checkpoint
