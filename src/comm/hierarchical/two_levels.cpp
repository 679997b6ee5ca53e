#include "comm/hierarchical/two_levels.h"

#include <algorithm>

namespace lockstep::comm {

void TwoLevels::give_up(std::string_view why) noexcept {
  if (dead) return;
  dead = why;
  for (const auto& part : {up, down, column, all}) {
    if (part) part->give_up(why);
  }
}

void TwoLevels::move_on() {
  up->move_on();
  down->move_on();
  pipeline.advance();
}

void OneLevelWork::finish() {
  levels_->guarded([&] { levels_->wait([&](auto limit) { return work_.wait_within(limit); }); });
}

bool OneLevelWork::advance() {
  return levels_->guarded([&] {
    levels_->move_on();
    return work_.is_completed();
  });
}

void TwoLevelWork::finish() {
  levels_->guarded([&] {
    for (const auto& chunk : chunks_) {
      levels_->wait([&](auto limit) { return levels_->pipeline.finish_within(*chunk, limit); });
    }
  });
  chunks_.clear();
}

bool TwoLevelWork::advance() {
  return levels_->guarded([&] {
    levels_->move_on();
    return std::all_of(chunks_.begin(), chunks_.end(),
                       [&](const auto& chunk) { return levels_->pipeline.is_over(*chunk); });
  });
}

}  // namespace lockstep::comm
