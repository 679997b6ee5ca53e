// Buffers that pass through slots piece by piece.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/divided_up.h"
#include "lockstep/core/shard.h"

namespace lockstep::comm {

inline void copy(char* to, const char* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

// The part of [0, bytes) in chunk `index` of chunks of `each` bytes.
inline Range chunk_of(int64_t bytes, int64_t index, int64_t each) {
  return {std::min(bytes, index * each), std::min(bytes, (index + 1) * each)};
}

// At least one: ranks synchronise in a call without elements, too.
inline int64_t chunks_in(int64_t bytes, int64_t each) {
  return std::max<int64_t>(1, divided_up(bytes, each));
}

}  // namespace lockstep::comm
