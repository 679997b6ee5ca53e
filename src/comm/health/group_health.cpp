#include "comm/health/group_health.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "comm/text.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

// The longest pause between two comparisons: each is three requests of every rank that waits.
constexpr std::chrono::seconds kLongestPause{30};

}  // namespace

milliseconds WireOperation::left() const {
  return std::max(milliseconds(0), timeout - std::chrono::duration_cast<milliseconds>(spent()));
}

bool WireOperation::is_due() {
  const auto waited = spent();
  if (waited <= next_look) return false;
  next_look = waited + std::min<steady_clock::duration>(waited, kLongestPause);
  return true;
}

GroupHealth::GroupHealth(std::string_view transport, const Store& store, int rank,
                         std::vector<int> members)
    : transport_(transport),
      store_(store),
      diagnosis_(rank, std::move(members), store.launcher_status()),
      peer_status_(store.clone(PeerStatus::kInquiry), rank, diagnosis_.members()) {}

void GroupHealth::attend(WireOperation& operation) {
  if (diagnosis_.launcher_reports()) fail(operation, diagnosis_.abort_text());
  if (operation.left().count() == 0)
    fail(operation, fmt::format("timed out after {}", text_of(operation.timeout)));
  if (operation.is_due()) look(operation);
}

// Ranks that wait long compare what they wait for, since different calls may wait for each other
// until the deadline. Once is not enough: on a busy machine the store may answer too late, and of
// two ranks the one that came first finds no notice to compare with.
void GroupHealth::look(WireOperation& operation) {
  // The others may have called something else where this rank started one that it does not wait
  // for.
  const auto first = first_under_way();
  if (first && (first->lane != operation.notice.lane || first->number != operation.notice.number)) {
    WireOperation before = operation;
    before.notice = *first;
    compare(before);
  }
  compare(operation);
}

void GroupHealth::compare(const WireOperation& operation) {
  const PeerStatus::Notices notices = peer_status_.exchange(operation.notice, milliseconds(0));
  for (const auto& notice : notices) {
    if (notice && notice->contradicts(operation.notice)) fail(operation, Notice::kOtherCall);
  }
  // Not every transport takes an abort to ranks that wait for others than the one that aborted.
  for (int peer = 0; peer < size(); ++peer) {
    const auto& notice = notices[static_cast<size_t>(peer)];
    if (notice && notice->state == Notice::State::Failed)
      fail(operation, fmt::format("failed ({} {})", diagnosis_.name(peer), notice->failure()));
  }
}

void GroupHealth::done(const WireOperation& operation) {
  if (!operation.has_looked()) return;
  Notice notice = operation.notice;
  notice.state = Notice::State::Running;
  peer_status_.post(notice);
}

void GroupHealth::fail(const WireOperation& operation, const std::string& reason) {
  Notice notice = operation.notice;
  notice.state = Notice::State::Failed;
  notice.reason = reason;
  const std::string seen = fmt::format("{} {}", notice.text, reason);
  if (!end_.say(seen)) check_alive();
  peer_status_.post(notice);
  abort(seen);
  const PeerStatus::Notices notices = peer_status_.exchange(notice, PeerStatus::kInquiry);
  const std::string end = diagnosis_.end(operation.notice, reason, notices);
  end_.explain(end);
  throw CommError(fmt::format("[{}] {}", transport_, end));
}

void GroupHealth::abort_all(std::string_view why) noexcept {
  const std::string reason(why);
  if (!end_.say(reason)) return;
  try {
    // Posted before the connections break and, perhaps, this process ends.
    peer_status_.exchange(
        {.state = Notice::State::Failed, .lane = "all", .text = Notice::kEnd, .reason = reason},
        milliseconds(0));
  } catch (const std::exception&) {
    // The others learn of it by the connections alone.
  }
  abort(reason);
}

void GroupHealth::abandon() noexcept {
  if (end_.say("it was destroyed")) leave();
}

void GroupHealth::check_alive() const {
  const auto why = end_.why();
  if (!why) return;
  throw CommError(fmt::format("[{}] this group has failed, make a new one; it ended when {}",
                              transport_, *why));
}

std::optional<std::string> GroupHealth::failure() {
  if (const auto why = end_.why()) return why;
  if (diagnosis_.launcher_reports()) return "the job " + diagnosis_.abort_text();
  const auto notices = peers_post() ? peer_status_.peek() : std::nullopt;
  if (!notices) return std::nullopt;
  std::string who;
  for (int peer = 0; peer < size(); ++peer) {
    const auto& notice = (*notices)[static_cast<size_t>(peer)];
    if (!notice || notice->state != Notice::State::Failed) continue;
    // Calls may have failed of the end that abort() has made.
    if (who.empty() || notice->text == Notice::kEnd)
      who = fmt::format(" ({} {})", diagnosis_.name(peer), notice->failure());
  }
  return "another rank has aborted it" + who;
}

}  // namespace lockstep::comm
