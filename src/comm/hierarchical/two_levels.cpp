#include "comm/hierarchical/two_levels.h"

#include <algorithm>
#include <string>

#include "comm/text.h"

namespace lockstep::comm {

void TwoLevels::abort_all(std::string_view why) noexcept {
  const std::lock_guard lock(ending);
  if (end.is_said()) return;
  for (const auto& part : {host_reduce, host_broadcast, column, all}) {
    if (part) part->abort_all(why);
  }
  end.say(std::string(why));
}

void TwoLevels::attend(WireOperation& operation) {
  const auto fail = [&](const std::string& reason, std::chrono::milliseconds limit) {
    Notice notice = operation.notice;
    notice.state = Notice::State::Failed;
    notice.reason = reason;
    const PeerStatus::Notices notices = peer_status.exchange(notice, limit);
    throw CommError(
        fmt::format("[host-then-net] {}", diagnosis.end(operation.notice, reason, notices)));
  };
  if (operation.left().count() == 0) {
    if (operation.notice.advice.empty()) operation.notice.advice = all->obstacle();
    fail(fmt::format("timed out after {}", text_of(operation.timeout)), kHearsay);
  }
  if (!operation.is_due()) return;
  const PeerStatus::Notices notices =
      peer_status.exchange(operation.notice, std::chrono::milliseconds(0));
  for (const auto& notice : notices) {
    if (notice && notice->contradicts(operation.notice))
      fail("is not what the others called", PeerStatus::kInquiry);
  }
}

void TwoLevels::done(const WireOperation& operation) {
  if (!operation.has_looked()) return;
  Notice notice = operation.notice;
  notice.state = Notice::State::Running;
  peer_status.post(notice);
}

void TwoLevels::move_on() {
  host_reduce->move_on();
  host_broadcast->move_on();
  pipeline.advance();
}

bool LevelsWork::finish_until(Clock::time_point until) {
  if (!levels_->guarded([&] { return wait_until(until); })) return false;
  levels_->done(operation_);
  return true;
}

bool LevelsWork::advance() {
  return levels_->guarded([&] {
    levels_->move_on();
    return is_over() || operation_.left().count() == 0;
  });
}

bool OneLevelWork::wait_until(Clock::time_point until) {
  return levels_->wait([&](auto limit) { return work_.wait_for(limit); }, operation_, until);
}

bool TwoLevelWork::wait_until(Clock::time_point until) {
  const bool over = std::all_of(chunks_.begin(), chunks_.end(), [&](const auto& chunk) {
    return levels_->wait([&](auto limit) { return levels_->pipeline.finish_within(*chunk, limit); },
                         operation_, until);
  });
  if (over) chunks_.clear();
  return over;
}

bool TwoLevelWork::is_over() {
  return std::all_of(chunks_.begin(), chunks_.end(),
                     [&](const auto& chunk) { return levels_->pipeline.is_over(*chunk); });
}

}  // namespace lockstep::comm
