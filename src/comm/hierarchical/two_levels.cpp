#include "comm/hierarchical/two_levels.h"

#include <algorithm>
#include <string>

namespace lockstep::comm {

void TwoLevels::abort_all(std::string_view why) noexcept {
  const std::lock_guard lock(ending);
  if (end.is_said()) return;
  for (const auto& part : {host_reduce, host_broadcast, column, all}) {
    if (part) part->abort_all(why);
  }
  end.say(std::string(why));
}

void TwoLevels::move_on() {
  host_reduce->move_on();
  host_broadcast->move_on();
  pipeline.advance();
}

bool OneLevelWork::finish_until(Clock::time_point until) {
  return levels_->guarded(
      [&] { return levels_->wait([&](auto limit) { return work_.wait_for(limit); }, until); });
}

bool OneLevelWork::advance() {
  return levels_->guarded([&] {
    levels_->move_on();
    return work_.is_completed();
  });
}

bool TwoLevelWork::finish_until(Clock::time_point until) {
  const bool over = levels_->guarded([&] {
    return std::all_of(chunks_.begin(), chunks_.end(), [&](const auto& chunk) {
      return levels_->wait(
          [&](auto limit) { return levels_->pipeline.finish_within(*chunk, limit); }, until);
    });
  });
  if (over) chunks_.clear();
  return over;
}

bool TwoLevelWork::advance() {
  return levels_->guarded([&] {
    levels_->move_on();
    return std::all_of(chunks_.begin(), chunks_.end(),
                       [&](const auto& chunk) { return levels_->pipeline.is_over(*chunk); });
  });
}

}  // namespace lockstep::comm
