// What one rank tells the others of memory that it has made for all of them. No torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "comm/shm/segment.h"

namespace lockstep::comm {

// As much of the text as there is room for, and a zero after it; `to` is all zeros.
template <size_t N>
void set_text(char (&to)[N], std::string_view text) {
  const size_t length = std::min(text.size(), N - 1);
  if (length != 0) std::memcpy(to, text.data(), length);
}

// A segment's whereabouts, or why there is none.
struct Offer {
  SegmentHandle handle;
  char problem[300];
};

// Creates a segment for the processes with these doors if it can; the offer says so either way.
Offer make_offer(Segment& segment, int64_t bytes, const std::vector<std::string>& doors);
// All but rank 0's, which makes the memory.
std::vector<std::string> others_of(const std::vector<std::string>& doors);
// Throws CommError where there is none, or it cannot be had here.
Segment attached(const Offer& offer);

}  // namespace lockstep::comm
