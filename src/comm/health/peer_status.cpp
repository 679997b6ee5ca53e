#include "comm/health/peer_status.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <sstream>
#include <system_error>
#include <thread>

#include "core/process/thread.h"

namespace lockstep::comm {
namespace {

// The longest time in which a working store answers.
constexpr std::chrono::milliseconds kAnswer{200};
// The same on a machine that is so busy that the store's thread has to wait for a core.
constexpr std::chrono::milliseconds kFirstAnswer{1000};
constexpr std::chrono::milliseconds kRound{10};
// How long to wait for the others' notices when the launcher has explained the failure: they get
// the same explanation at the same time.
constexpr std::chrono::milliseconds kExplained{100};

// Where a rank that waits long posts its call, for the others to compare with theirs; a call
// replaces an older one.
std::string call_key(const Notice& notice) {
  constexpr uint64_t kPlaces = 64;
  return fmt::format("lockstep/call/{}/{}", notice.lane, notice.number % kPlaces);
}

// Set once some rank has failed.
constexpr const char* kFailed = "lockstep/notice/failed";

std::string key_of(int rank) { return fmt::format("lockstep/notice/{}", rank); }
// Set once that rank has read the others' notices.
std::string reader_key(int rank) { return fmt::format("lockstep/notice/read/{}", rank); }

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

}  // namespace

std::string Notice::packed() const {
  return fmt::format("{}\n{}\n{}\n{}\n{}\n{}\n{}", static_cast<int>(state), number, one_line(lane),
                     one_line(signature), one_line(text), one_line(reason), one_line(advice));
}

std::optional<Notice> Notice::unpacked(const std::string& text) {
  std::istringstream in(text);
  Notice notice;
  int state = 0;
  if (!(in >> state >> notice.number) || state < 0 || state > 2) return std::nullopt;
  notice.state = static_cast<State>(state);
  in.ignore();
  std::getline(in, notice.lane);
  std::getline(in, notice.signature);
  std::getline(in, notice.text);
  std::getline(in, notice.reason);
  std::getline(in, notice.advice);
  return notice;
}

std::string Notice::failure() const {
  if (reason == kOtherCall) return fmt::format("is at {}, which {}", text, reason);
  return text == kEnd ? "aborted: " + reason : reason;
}

bool Notice::contradicts(const Notice& other) const {
  return state != State::Running && other.state != State::Running && lane == other.lane &&
         number == other.number && signature != other.signature;
}

// Owned by the thread that talks to the store, too: that thread may be stuck in it for as long as
// the kernel waits for a host that is gone.
struct PeerStatus::Shared {
  Shared(Store the_store, int the_rank, std::vector<int> the_members)
      : store(std::move(the_store)), rank(the_rank), members(std::move(the_members)) {}

  // Calls `talk` with what is `shared` in a thread of its own, which keeps it; not where the system
  // gives none. The mutex is held.
  template <class Talk>
  static void start(const std::shared_ptr<Shared>& shared, Talk talk);
  // Run in that thread.
  void say(const Notice& mine);
  void exchange(const Notice& mine, std::chrono::milliseconds limit);
  void compare(const Notice& mine);
  bool read_round();
  void await_readers(std::chrono::steady_clock::time_point end);
  int size() const { return static_cast<int>(members.size()); }
  bool is_gone(int peer) const { return store.launcher_status()->fate(members[peer]).has_value(); }

  const Store store;
  const int rank;
  const std::vector<int> members;
  std::mutex mutex;
  std::condition_variable changed;
  bool busy = false;
  bool failed = false;     // a rank has, and what it said has been read if it can be
  bool has_asked = false;  // for what it said; of peek()'s thread
  Notices notices;
};

// True when no rank is left whose notice could still become more informative.
bool PeerStatus::Shared::read_round() {
  bool all = true;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank) continue;
    const bool gone = is_gone(peer);  // checked first: it has posted its notice by then
    if (store.check({key_of(peer)})) {
      auto notice = Notice::unpacked(store.get(key_of(peer), kAnswer));
      const std::lock_guard lock(mutex);
      notices[peer] = std::move(notice);
    }
    const std::lock_guard lock(mutex);
    all = all && (gone || (notices[peer] && notices[peer]->state == Notice::State::Failed));
  }
  return all;
}

// Rank 0 serves the store: its exit would lose the notices that are posted there.
void PeerStatus::Shared::await_readers(std::chrono::steady_clock::time_point end) {
  store.set(reader_key(rank), "1");
  const auto all_have = [&] {
    for (int peer = 0; peer < size(); ++peer) {
      if (!is_gone(peer) && !store.check({reader_key(peer)})) return false;
    }
    return true;
  };
  while (members[rank] == 0 && !all_have() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(kRound);
  }
}

template <class Talk>
void PeerStatus::Shared::start(const std::shared_ptr<Shared>& shared, Talk talk) {
  const auto body = [shared, talk] {
    try {
      talk(*shared);
    } catch (const std::exception&) {
      // The store is gone: then no rank can post anything.
    }
    const std::lock_guard lock(shared->mutex);
    shared->busy = false;
    shared->changed.notify_all();
  };
  try {
    thread_without_signals(body).detach();
    shared->busy = true;
  } catch (const std::system_error&) {
    // The others learn of this rank by other ways, at the latest at their deadlines.
  }
}

void PeerStatus::Shared::say(const Notice& mine) {
  store.set(key_of(rank), mine.packed());
  if (mine.state == Notice::State::Failed) store.set(kFailed, "1");
}

// A few requests, however many ranks there are: all of them may look each second, because one is
// slow.
void PeerStatus::Shared::compare(const Notice& mine) {
  const auto text = fmt::format("{}\n{}", rank, mine.packed());
  const auto bytes = [](const std::string& said) {
    return std::vector<uint8_t>(said.begin(), said.end());
  };
  const auto swap = [&](const std::string& before) {
    const auto there = store.for_c10d()->compareSet(call_key(mine), bytes(before), bytes(text));
    return std::string(there.begin(), there.end());
  };
  for (std::string before, there = swap(before); there != text && there != before;
       there = swap(before)) {
    std::istringstream in(there);
    int peer = 0;
    in >> peer;
    in.ignore();
    const auto theirs = Notice::unpacked(there.substr(in.tellg()));
    if (!theirs || peer < 0 || peer >= size() || theirs->number > mine.number) break;
    if (theirs->number == mine.number) {
      const std::lock_guard lock(mutex);
      if (peer != rank) notices[peer] = theirs;
      break;
    }
    before = there;
  }
  if (store.check({kFailed})) read_round();
}

void PeerStatus::Shared::exchange(const Notice& mine, std::chrono::milliseconds limit) {
  const bool explained = store.launcher_status()->is_explained();
  const auto end =
      std::chrono::steady_clock::now() + (explained ? std::min(limit, kExplained) : limit);
  say(mine);
  if (mine.state == Notice::State::Waiting && limit.count() == 0) return compare(mine);
  // One answer shows that the store works, however long a round takes on a busy machine.
  store.wait({key_of(rank)}, kFirstAnswer);
  {
    const std::lock_guard lock(mutex);
    notices[rank] = mine;
  }
  while (!read_round() && std::chrono::steady_clock::now() + kRound < end) {
    std::this_thread::sleep_for(kRound);
  }
  if (mine.state != Notice::State::Failed) return;
  await_readers(explained ? end : end + kAnswer);
}

PeerStatus::PeerStatus(Store store, int rank, std::vector<int> members)
    : shared_(std::make_shared<Shared>(std::move(store), rank, std::move(members))) {
  shared_->notices.resize(shared_->members.size());
}

PeerStatus::Notices PeerStatus::exchange(const Notice& mine, std::chrono::milliseconds limit) {
  std::unique_lock lock(shared_->mutex);
  const auto end = std::chrono::steady_clock::now() + limit + kAnswer;
  const auto idle = [this] { return !shared_->busy; };
  if (!shared_->changed.wait_until(lock, end, idle)) return Notices(shared_->size());
  shared_->notices.assign(shared_->size(), std::nullopt);
  Shared::start(shared_, [mine, limit](Shared& shared) { shared.exchange(mine, limit); });
  const bool is_over = shared_->changed.wait_until(lock, end, idle);
  if (!is_over && limit.count() > 0) shared_->changed.wait_until(lock, end + kFirstAnswer, idle);
  return shared_->notices;
}

std::optional<PeerStatus::Notices> PeerStatus::peek() {
  const std::lock_guard lock(shared_->mutex);
  if (shared_->failed) return shared_->notices;
  if (shared_->busy) return std::nullopt;
  Shared::start(shared_, [](Shared& shared) {
    const bool again = shared.has_asked;
    if (!again && !shared.store.check({kFailed})) return;
    shared.has_asked = true;
    try {
      shared.read_round();
    } catch (const std::exception&) {
      if (!again) return;  // a store that is slow is asked once more; another one has gone
    }
    const std::lock_guard inner(shared.mutex);
    shared.failed = true;
  });
  return std::nullopt;
}

void PeerStatus::post(const Notice& mine) {
  const std::lock_guard lock(shared_->mutex);
  if (shared_->busy) return;
  Shared::start(shared_, [mine](Shared& shared) { shared.say(mine); });
}

}  // namespace lockstep::comm
