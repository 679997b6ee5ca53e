// Where named members lie in one flat memory of one dtype.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/shard.h"

namespace lockstep::parallel {

// Members of memory that kernels compute on begin on a cache line.
inline constexpr int64_t kCacheLine = 64;
// Members are cut at multiples of this many elements from their first, so that a vectorised kernel
// of an optimizer processes the same vectors and the same remainder as over the whole: the same
// bits.
inline constexpr int64_t kCutGrid = 1024;

// Names and numbers alone: it has no memory and communicates nothing, so that ranks which lay out
// the same members in the same order have the same layout.
class FlatLayout {
 public:
  struct Member {
    std::string name;
    int64_t numel;
    int64_t begin;  // element

    bool operator==(const Member&) const = default;
  };
  // Some of a member's elements.
  struct Portion {
    size_t member;
    Range range;  // of its elements
  };

  // Each member begins on a multiple of `alignment` bytes, which is one of the dtype's width.
  FlatLayout(at::ScalarType dtype, int64_t alignment);
  // One member right after the other.
  static FlatLayout packed(at::ScalarType dtype);

  // Returns the number of the member.
  size_t add(std::string name, int64_t numel);

  at::ScalarType dtype() const { return dtype_; }
  const std::vector<Member>& members() const { return members_; }
  // With the gaps between members, and after the last.
  int64_t numel() const { return numel_; }
  // Collectives know no complex numbers: those are pairs of real ones.
  int64_t reals() const { return numel_ * (c10::isComplexType(dtype_) ? 2 : 1); }

  // Where each of `parts` equal parts begins, and the end: parts + 1 elements. A cut is at a
  // member's end, or a multiple of `grid` elements from its begin.
  std::vector<int64_t> cuts(int64_t parts, int64_t grid) const;
  // What of the members lies in a range of elements, in order.
  std::vector<Portion> portions(const Range& range) const;

  // JSON, and back. Throws ConfigError for anything else.
  std::string text() const;
  static FlatLayout parse(std::string_view text);
  bool operator==(const FlatLayout&) const = default;

 private:
  at::ScalarType dtype_;
  int64_t width_, alignment_;
  int64_t numel_ = 0;
  std::vector<Member> members_;
};

}  // namespace lockstep::parallel
