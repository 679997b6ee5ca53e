#include "comm/shm/channel.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <thread>

#include "comm/host/core_sets.h"
#include "core/process/cgroup.h"
#include "core/process/cores.h"
#include "core/process/stat.h"
#include "core/time_limit.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// Spinning pays only while every rank has a core of its own; measured 400 times slower at 4 ranks
// on 2 cores. Then it pays for long: a rank that yields or sleeps while another program wants the
// core waits for that program's whole time slice of 3 ms (measured: a step of 1.3 ms took 3.3 ms
// with a spin of 100 us beside one compiler, 1.5 ms with this).
constexpr auto kSpin = microseconds(2000);
// So often a rank looks before it looks at the clock: where all are on time, that costs more than
// the wait.
constexpr int kLooks = 64;
constexpr int kYields = 50;
// How often a sleeping rank checks its peers: a lost one is noticed well within half a second.
constexpr microseconds kNap(20000);
// While something else is under way, of whose progress it is not notified.
constexpr microseconds kShortNap(500);

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds nap) {
  const timespec limit{0, nap.count()};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Counters wrap: "at least" is by distance.
bool reached(uint32_t value, uint32_t target) { return static_cast<int32_t>(value - target) >= 0; }

// Waits for `ready` as long as `patience` says: spins for kSpin from `since` on, then yields, then
// sleeps on `sleeper` in naps, after each of which `look_around` is called, which may throw. False
// when patience has ended first. The time for which this process was stopped moves `since`.
template <class Ready, class LookAround>
bool wait_until(const Ready& ready, Counter& sleeper, bool spin, Channel::Clock::time_point& since,
                const Patience& patience, const std::function<Idle()>& idle,
                const LookAround& look_around) {
  const auto stop = [&] { return std::min(since + patience.timeout, patience.until); };
  auto begin = Channel::Clock::now();
  const auto spin_end = std::min(stop(), since + kSpin);
  while (spin && Channel::Clock::now() < spin_end) {
    for (int i = 0; i < 64; ++i) {
      if (ready()) return true;
      relax();
    }
  }
  // Each may take a time slice of every other thread, on a busy machine.
  for (int i = 0; i < kYields && Channel::Clock::now() < stop(); ++i) {
    if (ready()) return true;
    if (Channel::Clock::now() >= stop()) break;
    idle();
    sched_yield();
  }
  for (;;) {
    const uint32_t seen = sleeper.value.load(std::memory_order_seq_cst);
    sleeper.sleepers.fetch_add(1, std::memory_order_seq_cst);
    // The rank that advances the counter either sees this sleeper counted, or its advance is seen
    // here.
    const bool now_ready = ready();
    if (!now_ready && sleeper.value.load(std::memory_order_seq_cst) == seen) {
      const Idle found = idle();
      const auto left = std::chrono::ceil<microseconds>(stop() - Channel::Clock::now());
      const auto nap = std::clamp(left, microseconds(0), found == Idle::Waits ? kShortNap : kNap);
      if (found != Idle::Moved) futex_wait(sleeper.value, seen, nap);
    }
    sleeper.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (now_ready || ready()) return true;
    look_around();
    if (ready()) return true;
    const auto now = Channel::Clock::now();
    since += standstill(now - begin, kNap);
    begin = now;
    if (now >= stop()) return false;
  }
}

}  // namespace

bool Announcement::agrees_with(const Announcement& other) const {
  constexpr size_t kAgreed = offsetof(Announcement, segment);
  static_assert(kAgreed == 64, "one cache line without gaps");
  return std::memcmp(this, &other, kAgreed) == 0;  // texts end in zeros
}

std::string Announcement::text(uint32_t sequence) const {
  std::vector<std::string> inside;
  if (label[0]) inside.emplace_back(label);
  if (caller != 0) inside.push_back(fmt::format("{} {}", caller_name, caller));
  if (pass != 0) inside.push_back(fmt::format("pass {}", pass));
  if (list[0]) {
    inside.push_back(fmt::format("{} x {}", dtype, list));
  } else if (dtype[0]) {
    inside.push_back(count >= 0 ? fmt::format("{} x {}", dtype, count) : dtype);
  }
  if (divide_by != 0) inside.push_back(fmt::format("divided by {}", divide_by));
  if (root >= 0) inside.push_back(fmt::format("root {}", root));
  const std::string name = fmt::format("{} #{}", what, sequence);
  return inside.empty() ? name : fmt::format("{} ({})", name, fmt::join(inside, ", "));
}

Channel::Channel(RankBlock* blocks, int rank, int size, milliseconds timeout,
                 std::shared_ptr<const LauncherStatus> launcher_status, std::vector<int> members,
                 std::vector<int> called, WatchedProcesses processes, int numa_node)
    : blocks_(blocks),
      rank_(rank),
      size_(size),
      processes_(std::move(processes)),
      seen_leaving_(size),
      members_(std::move(members)),
      called_(std::move(called)),
      launcher_status_(std::move(launcher_status)),
      posted_(blocks[rank].posted.value.load()),
      phase_(blocks[rank].phase.value.load()),
      all_done_(blocks[rank].done.value.load()) {
  processes_.resize(size);
  blocks_[rank].pid.store(getpid());
  Announcement hello;
  std::strcpy(hello.what, "join");
  const CoreSet own_cores = core_set(allowed_cores());
  static_assert(sizeof own_cores <= RankBlock::kShown);
  std::memcpy(blocks_[rank].shown_bytes, &own_cores, sizeof own_cores);
  hello.own_bytes = numa_node;  // of the fields on which ranks need not agree
  const uint32_t joined = post(hello);
  await_counter(&RankBlock::posted, joined, joined, {timeout});
  std::vector<CoreSet> cores(size);
  for (int r = 0; r < size; ++r) {
    numa_nodes_.push_back(static_cast<int>(announcement(r, joined).own_bytes));
    std::memcpy(&cores[r], blocks_[r].shown_bytes, sizeof cores[r]);
  }
  // Spinning also uses up the quota of the control groups.
  spin_ = size == 1 || (each_has_a_core(cores) && size <= group_cores().value_or(size));
  for (int peer = 0; launcher_status_ && peer < size; ++peer) {
    if (peer != rank && !processes_[peer])
      processes_[peer] = Process::watch(blocks_[peer].pid.load());
  }
  // No rank passes before all watch the others' processes, so one that is gone here has really
  // ended.
  arrive();
  await_met(joined, {timeout});
  set_done();
}

Channel::~Channel() {
  if (blocks_[rank_].pid.load() == getpid()) blocks_[rank_].left.store(1);  // no child of it
}

void Channel::advance(Counter& counter) {
  counter.value.fetch_add(1, std::memory_order_seq_cst);
  if (counter.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(counter.value);
}

uint32_t Channel::post(const Announcement& announcement) {
  check_alive();
  const uint32_t sequence = ++posted_;
  static_cast<Announcement&>(blocks_[rank_].ring[sequence % RankBlock::kRing]) = announcement;
  advance(blocks_[rank_].posted);
  return sequence;
}

const Announcement& Channel::announcement(int rank, uint32_t sequence) const {
  return blocks_[rank].ring[sequence % RankBlock::kRing];
}

bool Channel::have_all(Counter RankBlock::*counter, uint32_t value) const {
  for (int peer = 0; peer < size_; ++peer) {
    if (!reached((blocks_[peer].*counter).value.load(std::memory_order_acquire), value))
      return false;
  }
  return true;
}

bool Channel::all_posted(uint32_t sequence) {
  if (!have_all(&RankBlock::posted, sequence)) return false;
  for (int i = 1; i < size_; ++i) compare((rank_ + i) % size_, sequence);
  return true;
}

bool Channel::await_posted(uint32_t sequence, const Patience& patience) {
  return await_counter(&RankBlock::posted, sequence, sequence, patience);
}

void Channel::compare(int peer, uint32_t sequence) {
  const Announcement& mine = announcement(rank_, sequence);
  const Announcement& theirs = announcement(peer, sequence);
  if (mine.agrees_with(theirs)) return;
  fail(
      fmt::format("[shm] the ranks disagree: {} calls {}, {} calls {}. Every rank must make the "
                  "same calls in the same order with the same dtype and counts{}",
                  text_of(rank_), mine.text(sequence), text_of(peer), theirs.text(sequence),
                  advice(sequence, peer)));
}

std::string Channel::advice(uint32_t sequence, int peer) const {
  const Announcement& mine = announcement(rank_, sequence);
  const Announcement& theirs = announcement(peer, sequence);
  const char* said = mine.advice[0] ? mine.advice : theirs.advice;
  return said[0] ? fmt::format(" ({})", said) : "";
}

void Channel::arrive() {
  ++phase_;
  advance(blocks_[rank_].phase);
}

bool Channel::all_met() const { return have_all(&RankBlock::phase, phase_); }

bool Channel::await_met(uint32_t sequence, const Patience& patience) {
  return await_counter(&RankBlock::phase, phase_, sequence, patience);
}

void Channel::set_done() { advance(blocks_[rank_].done); }

bool Channel::all_done(uint32_t sequence) const {
  if (reached(all_done_, sequence)) return true;
  if (!have_all(&RankBlock::done, sequence)) return false;
  all_done_ = sequence;
  return true;
}

bool Channel::await_done(uint32_t sequence, const Patience& patience) {
  return all_done(sequence) || await_counter(&RankBlock::done, sequence, sequence, patience);
}

bool Channel::await_counter(Counter RankBlock::*counter, uint32_t value, uint32_t sequence,
                            const Patience& patience) {
  const auto behind = [&](int peer) {
    return !reached((blocks_[peer].*counter).value.load(std::memory_order_acquire), value);
  };
  // An operation that is under way cannot be overtaken, and its announcement must stay until it has
  // been compared.
  const std::function<Idle()>& idle =
      counter == &RankBlock::done ? move_everything_ : move_messages_;
  Clock::time_point own_since{};
  Clock::time_point& since = patience.since
                                 ? *patience.since
                                 : own_since;  // set by the first wait that is not over at once
  for (int i = 1; i < size_; ++i) {
    const int peer = (rank_ + i) % size_;
    for (int looks = 0; spin_ && looks < kLooks && behind(peer); ++looks) relax();
    if (behind(peer)) {
      if (since == Clock::time_point{}) since = Clock::now();
      const bool came = wait_until(
          [&] { return !behind(peer); }, blocks_[peer].*counter, spin_, since, patience, idle,
          [&] {
            check_alive();
            for (int other = 0; other < size_; ++other) {
              if (other == rank_ || !behind(other)) continue;
              check_peer(
                  other, [&] { return behind(other); },
                  announcement(rank_, sequence).text(sequence), advice(sequence, rank_));
            }
          });
      if (!came && patience.until < since + patience.timeout) return false;
      std::string late;
      for (int other = 0; !came && other < size_; ++other) {
        if (other != rank_ && behind(other)) late += (late.empty() ? "" : "; ") + where_is(other);
      }
      if (!late.empty()) {
        fail(fmt::format("[shm] {} timed out after {} s on {}: {}{}",
                         announcement(rank_, sequence).text(sequence),
                         patience.timeout.count() / 1000.0, text_of(rank_), late,
                         advice(sequence, rank_)));
      }
    }
    // Two ranks that disagree find out before the others have arrived.
    if (counter == &RankBlock::posted) compare(peer, sequence);
  }
  since = Clock::time_point{};
  return true;
}

bool Channel::await_bell(const std::function<bool()>& ready,
                         const std::function<std::string()>& what, int peer,
                         const Patience& patience) {
  if (ready()) return true;
  Clock::time_point own_since{};
  Clock::time_point& since = patience.since ? *patience.since : own_since;
  if (since == Clock::time_point{}) since = Clock::now();
  const bool came =
      wait_until(ready, blocks_[rank_].bell, spin_, since, patience, move_everything_, [&] {
        check_alive();
        check_peer(
            peer, [&] { return !ready(); }, what());
      });
  if (came) return true;
  if (patience.until < since + patience.timeout) return false;
  fail(fmt::format("[shm] {} timed out after {} s on {}: {}", what(),
                   patience.timeout.count() / 1000.0, text_of(rank_), where_is(peer)));
}

void Channel::ring(int rank) { advance(blocks_[rank].bell); }

void Channel::show(uint32_t number, std::string_view bytes) {
  RankBlock& block = blocks_[rank_];
  std::memcpy(block.shown_bytes, bytes.data(), std::min(bytes.size(), RankBlock::kShown));
  block.shown.store(number, std::memory_order_release);
  for (int peer = 0; peer < size_; ++peer) ring(peer);
}

const char* Channel::see(int peer, uint32_t number, const std::string& what,
                         const Patience& patience) {
  const RankBlock& block = blocks_[peer];
  check_alive();
  await_bell([&] { return block.shown.load(std::memory_order_acquire) == number; },
             [&] { return what; }, peer, patience);
  return block.shown_bytes;
}

// A process that ends lets go of its groups first, and how it ends says more.
bool Channel::has_left(int peer) {
  if (blocks_[peer].left.load(std::memory_order_acquire) == 0) return false;
  Clock::time_point& since = seen_leaving_[peer];
  if (since == Clock::time_point{}) since = Clock::now();
  return Clock::now() - since > std::chrono::seconds(1);
}

bool Channel::is_gone(int peer) const { return processes_[peer] && processes_[peer]->has_ended(); }

std::string Channel::text_of(int rank, std::string more) const {
  const bool is_told = launcher_status_ && !members_.empty();
  const int number = is_told ? launcher_status_->number_of(members_[rank]) : name_of(rank);
  return rank_text(name_of(rank), number, std::move(more));
}

std::string Channel::fate_of(int peer, milliseconds patience) const {
  // The launcher reaps the process a moment after its end is seen here.
  const auto until = Clock::now() + patience;
  while (launcher_status_ && launcher_status_->has_launcher()) {
    const auto fate = launcher_status_->fate(members_.empty() ? peer : members_[peer]);
    if (fate) return fmt::format("{} {}", text_of(peer), *fate);
    if (Clock::now() >= until) break;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return text_of(peer, fmt::format("process {}", processes_[peer]->pid())) + " has ended";
}

void Channel::check_peer(int peer, const std::function<bool()>& needed, const std::string& doing,
                         const std::string& advice) {
  // Checked first: what the process wrote before it ended is visible afterwards.
  const bool gone = is_gone(peer);
  const auto reason = reason_of(peer, RankBlock::kThrew);
  const bool left = has_left(peer);
  if ((gone || reason || left) && !needed()) return;
  const auto here = [&] { return fmt::format("[shm] {} on {}", doing, text_of(rank_)); };
  if (reason) fail(fmt::format("{}: {}", here(), *reason));
  if (gone || left) {
    const std::string fate =
        gone ? fate_of(peer, milliseconds(100)) : text_of(peer) + " has left the group";
    // A signal needs no other cause.
    const bool is_killed = fate.find("was killed") != std::string::npos;
    if (const auto cause = cause_said(); cause && !is_killed) fail(here() + ": " + *cause);
    fail(fmt::format("{} cannot go on: {}{}", here(), fate, is_killed ? "" : advice));
  }
  if (launcher_status_ && launcher_status_->has_reported())
    fail(fmt::format("{} {}", here(), launcher_status_->abort_text_with_ends()));
}

std::string Channel::where_is(int peer) const {
  const RankBlock& block = blocks_[peer];
  const uint32_t posted = block.posted.value.load(), done = block.done.value.load();
  if (is_gone(peer)) return fate_of(peer, milliseconds(0));
  const auto stat = process_stat(block.pid.load());
  const char* stopped = stat && stat->is_stopped() ? " (its process is stopped)" : "";
  if (block.pid.load() == 0) return fmt::format("{} has not come yet{}", text_of(peer), stopped);
  const std::string last = block.ring[posted % RankBlock::kRing].text(posted);
  if (done == posted)
    return fmt::format("{} is past {} and in no collective since{}", text_of(peer), last, stopped);
  return fmt::format("{} is at {}{}", text_of(peer), last, stopped);
}

void Channel::check_alive() {
  // Another thread may have ended it.
  if (dead_.empty() && blocks_[rank_].aborted.load(std::memory_order_acquire) != 0)
    dead_ = blocks_[rank_].reason;
  if (!dead_.empty())
    throw CommError(fmt::format("{} (this group has failed, make a new one)", dead_));
}

std::optional<std::string> Channel::reason_of(int rank, uint32_t least) const {
  if (blocks_[rank].aborted.load(std::memory_order_acquire) < least) return std::nullopt;
  return fmt::format("{} aborted: {}", text_of(rank), blocks_[rank].reason);
}

std::optional<std::string> Channel::cause_said() const {
  for (int rank = 0; rank < size_; ++rank) {
    if (auto reason = reason_of(rank, RankBlock::kSaid)) return reason;
  }
  return std::nullopt;
}

std::optional<std::string> Channel::failure() {
  if (blocks_[rank_].aborted.load(std::memory_order_acquire) != 0) return blocks_[rank_].reason;
  if (auto cause = cause_said()) return cause;
  for (int peer = 0; peer < size_; ++peer) {
    if (auto reason = reason_of(peer, RankBlock::kThrew)) return reason;
    if (is_gone(peer)) return fate_of(peer, milliseconds(0));
  }
  if (launcher_status_ && launcher_status_->has_reported())
    return "the job " + launcher_status_->abort_text_with_ends();
  return std::nullopt;
}

void Channel::abort_all(std::string_view why) noexcept { end(why, RankBlock::kSaid); }

void Channel::end(std::string_view why, uint32_t how) noexcept {
  if (aborting_.exchange(true)) return;
  RankBlock& block = blocks_[rank_];
  const size_t length = std::min(why.size(), sizeof block.reason - 1);
  std::memcpy(block.reason, why.data(), length);
  block.reason[length] = '\0';
  block.aborted.store(how, std::memory_order_release);
}

void Channel::fail(const std::string& text) {
  if (dead_.empty()) {
    dead_ = text;
    end(text, RankBlock::kThrew);
  }
  throw CommError(text);
}

}  // namespace lockstep::comm
