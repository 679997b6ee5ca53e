#include "comm/tcp/state.h"

#include <fmt/format.h>

#include <algorithm>

#include "comm/text.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// How often a wait looks at the launcher's status.
constexpr milliseconds kSlice{50};

milliseconds left_of(milliseconds timeout, steady_clock::time_point start) {
  const auto spent = std::chrono::duration_cast<milliseconds>(steady_clock::now() - start);
  return std::max(milliseconds(0), timeout - spent);
}

// FNV-1a of the keys under which the group meets, which are no other's: the same on every rank.
uint64_t id_of(const std::string& keys) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : keys) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

}  // namespace

TcpState::TcpState(std::shared_ptr<Net> net, const Store& store, int rank,
                   const TcpOptions& options)
    : net_(std::move(net)),
      store_(store),
      diagnosis_(rank, options.members, store.launcher_status()),
      options_(options),
      peer_status_(store.clone(PeerStatus::kInquiry), rank, diagnosis_.members()),
      group_(net_, id_of(store.keys()), rank, diagnosis_.members()) {}

std::string TcpState::words(const NetFailure& failure) const {
  if (failure.contradicts || failure.peer < 0) return failure.what;
  return fmt::format("failed ({} {})", diagnosis_.name(failure.peer), failure.what);
}

bool TcpState::await(const NetJob& job, TcpStep& step, steady_clock::time_point until) {
  for (;;) {
    if (!job.is_over()) check_alive();
    const milliseconds left = left_of(step.timeout, step.start);
    const auto now = steady_clock::now();
    const auto slice = std::max(milliseconds(1), std::min(kSlice, left));
    if (group_.wait(job, until - now < slice ? until : now + slice)) {
      if (job.failure()) {
        check_alive();
        fail(step, words(*job.failure()));
      }
      done(step);
      return true;
    }
    if (diagnosis_.launcher_reports()) fail(step, diagnosis_.given_up());
    if (left.count() == 0) fail(step, fmt::format("timed out after {}", text_of(step.timeout)));
    if (!step.looked && steady_clock::now() - step.start > PeerStatus::kLongWait) look(step);
    if (steady_clock::now() >= until) return false;
  }
}

// Ranks that wait long compare what they wait for, since different calls may wait for each other
// until the deadline.
void TcpState::look(TcpStep& step) {
  step.looked = true;
  const PeerStatus::Notices notices = peer_status_.exchange(step.notice, milliseconds(0));
  for (const auto& notice : notices) {
    if (notice && notice->contradicts(step.notice)) fail(step, "is not what the others called");
  }
}

void TcpState::done(const TcpStep& step) {
  if (!step.looked) return;
  Notice notice = step.notice;
  notice.state = Notice::State::Running;
  peer_status_.post(notice);
}

void TcpState::fail(const TcpStep& step, const std::string& reason) {
  Notice notice = step.notice;
  notice.state = Notice::State::Failed;
  notice.reason = reason;
  const std::string seen = fmt::format("{} {}", notice.text, reason);
  if (!end_.say(seen)) check_alive();
  peer_status_.post(notice);
  group_.abort(seen);
  const PeerStatus::Notices notices = peer_status_.exchange(notice, PeerStatus::kInquiry);
  const std::string end = diagnosis_.end(step.notice, reason, notices);
  end_.explain(end);
  throw CommError("[tcp] " + end);
}

void TcpState::give_up(std::string_view why) noexcept {
  const std::string reason(why);
  if (!end_.say(reason)) return;
  try {
    // Said before the others hear of it and, it may be, this process ends.
    peer_status_.exchange(
        {.state = Notice::State::Failed, .lane = "all", .text = Notice::kEnd, .reason = reason},
        milliseconds(0));
  } catch (const std::exception&) {
    // The others learn of it from the group alone.
  }
  group_.abort(reason);
}

void TcpState::abandon() noexcept {
  if (end_.say("it was destroyed")) group_.leave();
}

void TcpState::check_alive() const {
  const auto why = end_.why();
  if (!why) return;
  throw CommError("[tcp] this group is dead, make a new one; it ended when " + *why);
}

std::optional<std::string> TcpState::failure() {
  if (const auto why = end_.why()) return why;
  if (diagnosis_.launcher_reports()) return "the job " + diagnosis_.given_up();
  if (peer_status_.peek()) return "another rank has given it up";
  return std::nullopt;
}

}  // namespace lockstep::comm
