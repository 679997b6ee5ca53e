#include "comm/health/diagnosis.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <system_error>

#include "core/process/thread.h"
#include "lockstep/core/environment.h"

namespace lockstep::comm {
namespace {

// How many ranks an error names.
constexpr size_t kNamed = 8;

bool is_late(const std::string& reason) { return reason.starts_with("timed out"); }

// Why the system gives this process no thread, such as the one that asks the store.
std::optional<std::string> refused_thread() {
  try {
    thread_without_signals([] {}).join();
    return std::nullopt;
  } catch (const std::system_error& refused) {
    return refused.what();
  }
}

}  // namespace

Diagnosis::Diagnosis(int rank, std::vector<int> members,
                     std::shared_ptr<const LauncherStatus> launcher_status)
    : rank_(rank), members_(std::move(members)), launcher_status_(std::move(launcher_status)) {}

std::string Diagnosis::end(const Notice& mine, const std::string& seen,
                           const PeerStatus::Notices& notices) const {
  const std::string what = launcher_status_->is_explained() ? abort_text() : seen;
  std::string around = others(mine, seen, notices);
  // Where the reason is known, nothing is left to say of the others.
  if (around.empty() && !launcher_status_->is_explained() &&
      what.find("(rank ") == std::string::npos) {
    around = "all other ranks are in it, too: look at the network between the hosts";
  }
  return fmt::format("{} {} on {}{}{}{}", mine.text, what, name(rank_), around.empty() ? "" : ": ",
                     around, advice(mine, notices));
}

std::string Diagnosis::advice(const Notice& mine, const PeerStatus::Notices& notices) const {
  std::string said = mine.advice;
  for (int peer = 0; peer < size(); ++peer) {
    const auto end = fate(peer);
    if (end && end->find("was killed") != std::string::npos)
      return "";  // a signal needs no other cause
    if (said.empty() && notices[peer]) said = notices[peer]->advice;
  }
  return said.empty() || launcher_status_->is_explained() ? "" : " (" + said + ")";
}

std::string Diagnosis::silent_store() const {
  if (const auto refused = refused_thread()) {
    return fmt::format(
        "the ranks' store was not asked, so where the others are is not known: this process may "
        "have no further thread ({})",
        *refused);
  }
  const bool of_torchrun = env_text("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
  if (!of_torchrun && members_[rank_] == 0) {
    return "the ranks' store, which this rank serves, does not answer it, so where the others are "
           "is not known: this machine is overloaded, or the process may have no further thread";
  }
  return fmt::format(
      "the ranks' store does not answer, so where the others are is not known: {}, which serves "
      "it, has ended or is stopped, or look at the network between the hosts",
      of_torchrun        ? "torchrun's agent"
      : members_[0] == 0 ? "rank 0"
                         : "rank 0 of the world");
}

std::string Diagnosis::others(const Notice& mine, const std::string& seen,
                              const PeerStatus::Notices& notices) const {
  std::vector<std::string> said;
  size_t along = 0;
  bool is_unknown = false;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    const auto& notice = notices[peer];
    if (const auto end = fate(peer)) {
      said.push_back(fmt::format("{} {}", name(peer), *end));
    } else if (!notice) {
      if (launcher_status_->is_explained())
        continue;  // the launcher is ending the job, so peers do not reply
      // Without the store this rank knows nothing of any other.
      is_unknown = !notices[rank_];
      if (is_unknown) continue;
      said.push_back(name(peer) +
                     " did not answer: it is outside this group's calls, or has ended, or cannot "
                     "be reached");
    } else if (notice->state == Notice::State::Failed && notice->text == Notice::kEnd) {
      // Where this is what was seen, the error has said so.
      const bool was_seen = !launcher_status_->is_explained() &&
                            seen.find(name(peer) + " aborted") != std::string::npos &&
                            seen.find(notice->reason) != std::string::npos;
      if (!was_seen) said.push_back(fmt::format("{} {}", name(peer), notice->failure()));
    } else if (notice->state == Notice::State::Running) {
      // Calls in which it did not wait so long have left no notice.
      said.push_back(fmt::format(
          "{} is in no call, and the last in which it waited for more than {:g} s was {}",
          name(peer), std::chrono::duration<double>(PeerStatus::kLongWait).count(), notice->text));
    } else if (notice->lane == mine.lane && notice->number == mine.number &&
               notice->signature == mine.signature) {
      // Its end is why the connections to it were closed.
      if (is_late(notice->reason) && !is_late(seen)) {
        said.push_back(fmt::format("{} {}", name(peer), notice->reason));
      } else {
        ++along;
      }
    } else {
      // Of that this rank may have seen the end of the connection only.
      const bool explains = notice->reason == Notice::kOtherCall && seen != Notice::kOtherCall;
      said.push_back(fmt::format("{} is at {}{}", name(peer), notice->text,
                                 explains ? ", which " + notice->reason : ""));
    }
  }
  if (is_unknown) said.push_back(silent_store());
  if (said.empty()) return "";
  if (said.size() > kNamed) {
    const size_t more = said.size() - kNamed;
    said.resize(kNamed);
    said.push_back(fmt::format("and {} more ranks", more));
  }
  if (along > 0)
    said.push_back(fmt::format("{} {} in it, too", along, along == 1 ? "rank is" : "ranks are"));
  return fmt::format("{}", fmt::join(said, ", "));
}

}  // namespace lockstep::comm
