// A box: the part of a tensor between two corners.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/shard.h"

namespace lockstep::checkpoint {

// A tensor's sizes, dimension by dimension.
using Sizes = std::vector<int64_t>;

// Elements [offset[d], offset[d] + size[d]) of each dimension d. Of a scalar: no dimensions, one
// element.
struct Box {
  Sizes offset;
  Sizes size;

  bool operator==(const Box&) const = default;
};

// The product; 1 for no dimensions.
int64_t elements(const Sizes& sizes);

// All of a tensor.
Box whole(const Sizes& sizes);

// What two boxes of a tensor have in common; nothing when that has no element.
std::optional<Box> intersection(const Box& a, const Box& b);

// The elements that come `range` in row-major order, as boxes in that order: at most 2 d - 1 for d
// dimensions, and none for an empty range.
std::vector<Box> boxes_of(const Sizes& sizes, const Range& range);

// Whether a tensor has all of a box.
bool is_inside(const Sizes& sizes, const Box& box);

// "" when the boxes hold each element of a tensor once; else what is wrong: "[0:4, 2:3] lies
// outside", "... overlaps ...", "12 of 16 elements".
std::string fault_of(const Sizes& sizes, const std::vector<Box>& boxes);

// "[0:4, 2:3]".
std::string text_of(const Box& box);

}  // namespace lockstep::checkpoint
