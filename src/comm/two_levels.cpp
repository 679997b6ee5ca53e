#include "comm/two_levels.h"

#include <algorithm>

namespace lockstep::comm {

void TwoLevels::give_up(std::string_view why) noexcept {
  if (dead) return;
  dead = why;
  for (const auto& part : {up, down, column, all}) {
    if (part) part->give_up(why);
  }
}

void TwoLevelWork::finish() {
  levels_->guarded([&] {
    for (const auto& piece : pieces_) levels_->pipeline.finish(*piece);
  });
  pieces_.clear();
}

bool TwoLevelWork::advance() {
  return levels_->guarded([&] {
    return std::all_of(pieces_.begin(), pieces_.end(),
                       [&](const auto& piece) { return levels_->pipeline.is_over(*piece); });
  });
}

}  // namespace lockstep::comm
