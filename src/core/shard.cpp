#include "lockstep/core/shard.h"

#include <fmt/format.h>

#include <algorithm>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

// Where part `index` begins.
int64_t begin_of(int64_t index, int64_t count, int64_t length, Remainder remainder) {
  const int64_t each = length / count, rest = length % count;
  switch (remainder) {
    case Remainder::First:
      return index * each + std::min(index, rest);
    case Remainder::Last:
      return index * each + std::max<int64_t>(0, index - (count - rest));
    case Remainder::Spread:
      // floor(index * length / count), without the product that could overflow
      return index * each + index * rest / count;
  }
  return 0;
}

}  // namespace

Range Shard::of(int64_t length, Remainder remainder) const {
  if (count < 1 || index < 0 || index >= count || length < 0) {
    throw ConfigError(fmt::format(
        "[shard] part {} of {} of a range of {}: need 0 <= index < count and length >= 0", index,
        count, length));
  }
  return {begin_of(index, count, length, remainder), begin_of(index + 1, count, length, remainder)};
}

}  // namespace lockstep
