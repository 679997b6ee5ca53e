// Which elements each rank adds up when a reduction is divided among ranks. No torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/divided_up.h"
#include "lockstep/core/shard.h"

namespace lockstep::comm {

// The elements [begin, end) of `count` that rank r of n reduces: whole cache lines.
inline Range slice_of(int rank, int size, int64_t count, int64_t element_bytes) {
  const int64_t line = std::max<int64_t>(1, 64 / element_bytes);
  const Range lines = Shard{rank, size}.of(divided_up(count, line));
  return {std::min(count, lines.begin * line), std::min(count, lines.end * line)};
}

}  // namespace lockstep::comm
